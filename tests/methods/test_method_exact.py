"""Every method of the table in one process against the float64 truth, with every byte counted.

Workspaces and outputs begin as NaN, so nothing can be read before it is written.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from method_cases import RANKS, cases, heads_for, problem_of, ranks_in_turn
from method_settings import refusal

from mesh_attention import Mask, verify
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.layout import LayoutKind
from support.cases import Case
from support.listed import stretches_for
from support.local_check import check
from support.random_masks import random_cuts

IN_TURN = [(name, ranks) for name in METHODS for ranks in ranks_in_turn(name)]
FEW = 6  # from so many ranks on, a part of the shapes
MANY = 8  # beyond, all are slow tests; below, each method has every third number in its turn


def is_default(name: str, ranks: int) -> bool:
    return ranks <= MANY and (ranks + list(METHODS).index(name)) % 3 == 0


def drawn(name: str, ranks: int) -> list[Case]:
    if ranks < FEW:
        return list(cases(name, ranks, at_least=3, at_most=3))
    return list(cases(name, ranks, at_least=2, at_most=2))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.slow] * (not is_default(name, ranks)))
        for name, ranks in IN_TURN
    ],
)
def test_every_method_equals_the_truth_and_moves_the_counted_bytes(name: str, ranks: int) -> None:
    for case in drawn(name, ranks):
        check(case)


@pytest.mark.parametrize("name", METHODS)
def test_documents_on_a_listed_layout_equal_the_truth_and_are_proven(name: str) -> None:
    """Stretches of any lengths in any order: most ranks hold parts of several documents."""
    for seed, ranks in enumerate((3, 4)):
        draw = Random(f"{name} {seed}")
        tokens = draw.randint(30, 60)
        starts = random_cuts(draw, tokens)
        mask = Mask(causal=seed == 0, documents=starts, window=(None, (9, 0))[seed])
        stretches = stretches_for("listed", draw, tokens, ranks)
        options = {"method": name, "layout": "listed", "stretches": stretches}
        case = Case(ranks, tokens, tokens, (2 * ranks, ranks), mask=mask, options=options)
        check(case)
        assert not verify(case.plan())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in METHODS for r in RANKS if r > 8])
def test_every_shape_of_every_method_equals_the_truth(name: str, ranks: int) -> None:
    for case in cases(name, ranks):
        check(case)


@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_in_bf16_every_method_stays_within_its_rounding(name: str, ranks: int) -> None:
    """Accumulators and what travels differ in precision here, so other buffers are at work."""
    for drawn_case in cases(name, ranks, at_least=2, at_most=2):
        check(replace(drawn_case, dtype=torch.bfloat16), bound=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_the_cases_of_a_method_cover_what_they_promise(name: str) -> None:
    all_of_it = [case for ranks in ranks_in_turn(name) for case in drawn(name, ranks)]
    assert {case.ranks for case in all_of_it} >= {*range(1, 13), 16, 18}
    assert {case.options["layout"] for case in all_of_it} == set(LayoutKind)
    relayouts = {(case.options["layout"], case.options["relayout"]) for case in all_of_it}
    assert relayouts == set(product(LayoutKind, (False, True)))
    assert {case.batch for case in all_of_it} == {1, 2}
    assert {case.dtype for case in all_of_it} == {torch.float64}
    for wanted in (
        lambda c: c.mask.causal,
        lambda c: not c.mask.causal,
        lambda c: c.heads[0] == c.heads[1],
        lambda c: c.heads[0] > c.heads[1],
        lambda c: c.heads[1] < c.ranks,
        lambda c: c.q_tokens % c.ranks,
        lambda c: c.q_tokens < c.ranks,
        lambda c: c.q_tokens != c.kv_tokens,
        lambda c: c.head_dims[0] != c.head_dims[1],
    ):
        assert sum(bool(wanted(case)) for case in all_of_it) >= 4
    for ranks in ranks_in_turn(name):
        assert {case.mask.causal for case in all_of_it if case.ranks == ranks} == {True, False}


def test_the_numbers_of_ranks_are_shared_out_among_the_methods() -> None:
    assert {ranks for _, ranks in IN_TURN} == set(RANKS)
    default = [(name, ranks) for name, ranks in IN_TURN if is_default(name, ranks)]
    assert {ranks for _, ranks in default} == set(range(1, MANY + 1))
    for name in METHODS:
        numbers = [ranks for each, ranks in default if each == name]
        assert min(numbers) < FEW <= max(numbers)


@pytest.mark.parametrize("ranks", RANKS)
def test_with_heads_to_share_out_no_method_refuses_any_number_of_ranks(ranks: int) -> None:
    for heads, method in product(heads_for(ranks), METHODS.values()):
        assert refusal(method, problem_of(ranks, heads), ranks) is None
