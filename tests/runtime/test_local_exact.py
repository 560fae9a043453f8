"""Plans run in one process against the float64 truth, with every byte counted.

Workspaces and outputs begin as NaN, so a result that was never written, or was read too early,
cannot pass.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.testing import run_local
from support.cases import Case, random_case, tiles
from support.listed import stretches_for
from support.local_check import check
from support.reference import NAMES, attention, errors

# Every rank costs as much again, and what goes wrong does so on few of them too.
CASES_PER_TILE = {True: 6, False: 2}  # by whether there are at most 8 ranks


def random_cases(ranks: int, tile: tuple[int, int]) -> list[Case]:
    number = tiles().index((ranks, tile))
    return [random_case(1000 * number + i, ranks, tile) for i in range(CASES_PER_TILE[ranks <= 8])]


@pytest.mark.parametrize(
    ("ranks", "tile"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] > 9)) for each in tiles()],
)
def test_random_cases_equal_the_truth_and_move_the_counted_bytes(
    ranks: int, tile: tuple[int, int]
) -> None:
    for case in random_cases(ranks, tile)[::3]:
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tile"), tiles())
def test_the_other_random_cases_equal_the_truth_too(ranks: int, tile: tuple[int, int]) -> None:
    for number, case in enumerate(random_cases(ranks, tile)):
        if number % 3:
            check(case)


def test_the_random_cases_cover_what_they_promise() -> None:
    cases = [case for ranks, tile in tiles() for case in random_cases(ranks, tile)]
    assert len(cases) >= 150
    assert {case.ranks for case in cases} == set(range(1, 17))
    assert {1, 7} <= {case.q_tokens for case in cases}
    assert {(28, 7), (40, 8), (8, 1)} <= {case.heads for case in cases}
    assert {case.batch for case in cases} == {1, 2, 3}
    assert {case.options["layout"] for case in cases} == set(LayoutKind)
    assert {case.dtype for case in cases} == {torch.float64, torch.float32}
    for wanted in (
        lambda c: c.q_tokens != c.kv_tokens,
        lambda c: c.head_dims[0] != c.head_dims[1],
        lambda c: c.q_tokens % c.ranks,
        lambda c: c.q_tokens < c.ranks,
        lambda c: c.mask == Mask(),
        lambda c: c.mask == Mask(causal=True),
        lambda c: c.mask.window,
        lambda c: c.mask.prefix,
        lambda c: c.mask.documents,
        lambda c: not c.options["rotation"],
        lambda c: c.options["gather_out"],
        lambda c: c.options["chunks"] != (1, 1),
        lambda c: c.options.get("head_slices"),
        lambda c: c.options.get("head_slices") and c.options["chunks"] != (1, 1),
    ):
        assert sum(bool(wanted(case)) for case in cases) >= 20


LONG = Case(ranks=8, q_tokens=1499, kv_tokens=1499, heads=(2, 1), head_dims=(16, 16))


@pytest.mark.parametrize(
    "case",
    [
        replace(LONG, mask=Mask(causal=True), options={"tile": (4, 2), "chunks": (2, 2)}),
        replace(LONG, ranks=7, mask=Mask(causal=True), options={"layout": "striped"}),
        replace(LONG, ranks=9, dtype=torch.float32, options={"combine": Combine.REDUCE_SCATTER}),
        replace(LONG, ranks=6, kv_tokens=1177, mask=Mask(causal=True), dtype=torch.float32),
        replace(LONG, ranks=8, mask=Mask(causal=True, window=(150, 0))),
        replace(LONG, ranks=10, mask=Mask(causal=True, documents=(0, 350, 351, 1024, 1499))),
    ],
    ids=["causal", "striped", "full", "cross", "window", "documents"],
)
def test_1499_tokens_equal_the_truth(case: Case) -> None:
    options = {"layout": "zigzag", **case.options}
    check(replace(case, options=options))


@pytest.mark.parametrize("ranks", [8, 16])
def test_more_ranks_than_tokens_give_no_nan(ranks: int) -> None:
    """Most ranks own padding alone: no key to see, no query to answer."""
    for layout in LayoutKind:
        stretches = stretches_for(layout, Random(0), 3, ranks)
        options = {"layout": layout, "chunks": (2, 2), "stretches": stretches}
        case = Case(ranks, 3, 3, mask=Mask(causal=True), options=options)
        result = check(case)
        assert not any(getattr(result, name).isnan().any() for name in NAMES)


def test_queries_that_see_no_key_give_zero_and_minus_infinity() -> None:
    case = Case(4, 20, 8, mask=Mask(causal=True), options={"layout": "zigzag"})
    result = check(case)
    assert (result.out[:, :12] == 0).all()
    assert (result.lse[:, :, :12] == -math.inf).all()
    assert result.grad_q is not None
    assert (result.grad_q[:, :12] == 0).all()


def test_log_sum_exps_that_differ_by_ten_thousand_merge_exactly() -> None:
    """Rank by rank the keys are so unlike that one rank's partial must win, or none does."""
    case = Case(4, 64, 64, heads=(2, 2), options={"tile": (2, 2)})
    q, k, v, grad_out = case.tensors()
    k[:, :16] *= 2e4
    k[:, 40:] *= 1e-4
    result = run_local(case.plan(), q, k, v, grad_out)
    truth = attention(q, k, v, grad_out, case.mask)
    assert truth.lse.max() - truth.lse.min() > 1e4
    results = {name: getattr(result, name) for name in ("out", "lse", "grad_v")}
    assert max(errors(results, truth).values()) <= 1e-10


def test_two_runs_are_bit_equal() -> None:
    case = Case(
        9, 101, 101, heads=(4, 2), mask=Mask(causal=True), dtype=torch.bfloat16,
        options={"tile": (3, 3), "chunks": (2, 2), "layout": "zigzag"},
    )  # fmt: skip
    first, second = (run_local(case.plan(), *case.tensors()) for _ in range(2))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in NAMES)


def test_a_scale_of_the_callers_own_is_used() -> None:
    case = Case(4, 33, 33, mask=Mask(causal=True))
    q, k, v, grad_out = case.tensors()
    result = run_local(case.plan(), q, k, v, grad_out, softmax_scale=0.7)
    truth = attention(q, k, v, grad_out, case.mask, scale=0.7)
    results = {name: getattr(result, name) for name in NAMES}
    assert max(errors(results, truth).values()) <= 1e-10
