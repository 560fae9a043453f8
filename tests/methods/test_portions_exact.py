"""Exchanges portion by portion, run: outputs and all gradients against the float64 truth."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mesh_attention import Mask, MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.testing import run_local
from support.cases import Case
from support.gloo_check import check as check_by_gloo
from support.listed import stretches_for
from support.local_check import check
from support.pool import WorkerPool
from support.random_masks import random_cuts
from support.reference import NAMES

# Ranks, (heads, KV heads), options.
RUNS: list[tuple[int, tuple[int, int], dict[str, Any]]] = [
    (3, (9, 9), {"method": "ulysses", "head_slices": (1, 2)}),
    (4, (16, 4), {"method": "ulysses", "chunks": (8, 2)}),
    (4, (8, 2), {"method": "ulysses", "chunks": (2, 2), "backward_chunks": (4, 3)}),
    (6, (4, 4), {"method": "usp", "ulysses": 2, "head_slices": (1, 1), "chunks": (2, 2)}),
    (8, (8, 2), {"method": "usp", "ulysses": 4, "chunks": (4, 2), "gradients": "travel"}),
    (8, (8, 4), {"method": "double-ring", "ulysses": 2, "inner": 2, "chunks": (3, 1)}),
    (4, (4, 2), {"method": "ring", "head_slices": (1, 1), "chunks": (2, 2)}),
    (6, (8, 2), {"method": "mesh-usp", "ulysses": 2, "tile": (3, 1), "chunks": (4, 2)}),
    (8, (8, 2), {"method": "mesh-usp", "ulysses": 4, "tile": (1, 2), "chunks": (2, 3)}),
]


def drawn(ranks: int, heads: tuple[int, int], options: dict[str, Any], seed: int) -> Case:
    """Odd lengths, also shorter than the ranks, every layout and kind of mask in turn."""
    draw = Random(seed)
    layout = ("zigzag", "contiguous", "striped", "listed")[seed % 4]
    tokens = draw.choice([ranks - 1, 2 * ranks + 1, draw.randint(20, 45)])
    mask = (
        Mask(causal=True), Mask(), Mask(causal=True, window=(7, 0)),
        Mask(causal=True, documents=random_cuts(draw, tokens)),
    )[seed % 4]  # fmt: skip
    stretches = stretches_for(layout, draw, tokens, ranks)
    keys = tokens if layout == "listed" or seed % 4 != 1 else draw.randint(1, 40)
    more = {"layout": layout, "stretches": stretches, "gather_out": seed % 3 == 0}
    more["one_call"] = seed % 5 == 0
    return Case(ranks, tokens, keys, heads, mask=mask, seed=seed, options=options | more)


SLICED = {"method": "mesh-usp", "ulysses": 2, "tile": (2, 1), "head_slices": (1, 1)}


def test_results_of_a_slice_leave_when_the_last_of_its_reductions_is_done() -> None:
    """With a tile a x 1 that of dQ ends behind that of dK and dV, which comes after it."""
    case = Case(4, 16, 16, (4, 4), mask=Mask(causal=True), options=SLICED)
    check(case)


def early(plan: Plan) -> Plan:
    """Results leave before the sums that make them."""
    programs = []
    for program in plan.backward.programs:
        names = [op.name for op in program.operations]
        operations = [*program.operations]
        operations.insert(names.index("RS-dQ-0.sum"), operations.pop(names.index("EX-OUT-0")))
        programs.append(replace(program, operations=tuple(operations)))
    return replace(plan, passes=(plan.forward, replace(plan.backward, programs=programs)))


def test_a_program_that_reads_what_is_not_there_yet_is_refused() -> None:
    case = Case(4, 16, 16, (4, 4), mask=Mask(causal=True), options=SLICED)
    with pytest.raises(
        MeshAttentionError,
        match=r"backward program of rank 0 cannot run: EX-OUT-0 reads grad_q\.u\.0 before it is",
    ):
        run_local(early(case.plan()), *case.tensors())


def test_poison_shows_what_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other buffers lay before."""
    monkeypatch.setattr("mesh_attention.runtime.execute.frame.order_fault", lambda program: None)
    case = Case(4, 16, 16, (4, 4), mask=Mask(causal=True), options=SLICED)
    result = run_local(early(case.plan()), *case.tensors())
    spoiled = {name for name in NAMES if getattr(result, name).isnan().any()}
    assert spoiled == {"grad_q"}


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_portions_equal_the_truth_and_move_the_counted_bytes(number: int) -> None:
    for seed in (number, number + 3)[: 1 if RUNS[number][0] == 8 else 2]:
        check(drawn(*RUNS[number], seed))


def test_portions_over_processes_equal_the_truth(pool: WorkerPool) -> None:
    """One of each kind; of the others the test above runs all ranks in one process."""
    cases = [drawn(*run, seed) for seed, run in enumerate(RUNS) if run[0] == 4]
    check_by_gloo(pool, [replace(cases[0], batch=2), cases[-1]])
