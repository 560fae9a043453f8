"""Copies that are left out, and rows that are not summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.language.buffers import Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, Merge, Program
from mesh_attention.plan.language.workspace import workspace_map
from mesh_attention.plan.passes.compile import compile_plan
from mesh_attention.plan.passes.place import placed, without_copies, without_row_sums
from mesh_attention.plan.read.verify import verify
from support.cases import Case
from support.targets import SLOW_AND_ANY_MASK, with_calls


def fused(case: Case, rank: int, direction: Direction) -> tuple[Program, Program]:
    plan = case.plan()
    program, _ = with_calls(plan.program(rank, direction), plan, direction, SLOW_AND_ANY_MASK)
    return program, without_copies(program, workspace_map(program, plan.problem))


def num_merges(program: Program) -> int:
    return sum(isinstance(op, Merge) for op in program.operations)


def test_one_rank_writes_its_results_where_the_caller_takes_them() -> None:
    case = Case(1, 40, 40, mask=Mask(causal=True, window=(7, 0)), dtype=torch.bfloat16)
    _, forward = fused(case, 0, Direction.FORWARD)
    (attend,) = (op for op in forward.operations if isinstance(op, Attend))
    assert (attend.out.buffer, attend.lse.buffer) == ("out", "lse")
    assert num_merges(forward) == 0
    _, backward = fused(case, 0, Direction.BACKWARD)
    (gradients,) = (op for op in backward.operations if isinstance(op, AttendBackward))
    written = [p.buffer for p in (gradients.grad_q, gradients.grad_k, gradients.grad_v)]
    assert written == ["grad_q", "grad_k", "grad_v"]
    assert num_merges(backward) == 1  # delta


def test_chunks_of_queries_are_each_written_to_their_own_rows_of_the_caller() -> None:
    case = Case(1, 40, 40, dtype=torch.bfloat16, options={"chunks": (2, 1)})
    _, forward = fused(case, 0, Direction.FORWARD)
    attentions = [op for op in forward.operations if isinstance(op, Attend)]
    written = [(op.out.buffer, op.out.start, op.out.stop) for op in attentions]
    assert written == [("out", 0, 20), ("out", 20, 40)]
    assert num_merges(forward) == 0


@pytest.mark.parametrize("direction", list(Direction))
def test_what_travels_is_written_in_the_precision_in_which_it_travels(direction: Direction) -> None:
    case = Case(
        8, 512, 512, heads=(8, 8), mask=Mask(causal=True), dtype=torch.bfloat16,
        options={"tile": (4, 2), "chunks": (1, 1)},
    )  # fmt: skip
    before, after = fused(case, 3, direction)
    assert num_merges(after) < num_merges(before)
    table = after.buffer_table()
    for op in after.operations:
        if isinstance(op, Attend):
            assert table[op.out.buffer].precision is Precision.ELEMENT
    assert after.buffers == before.buffers  # where they lie is known to other ranks


@pytest.mark.parametrize("direction", list(Direction))
def test_where_nobody_knows_the_places_heads_first_copies_nothing(direction: Direction) -> None:
    case = Case(
        4, 512, 512, heads=(4, 4), mask=Mask(causal=True), dtype=torch.bfloat16,
        options={
            "method": "ulysses", "layout": "contiguous", "chunks": (1, 1), "keep": "shards",
        },
    )  # fmt: skip
    before, as_placed = fused(case, 1, direction)
    after = without_copies(before)
    assert num_merges(before) == num_merges(as_placed) > num_merges(after)
    assert num_merges(after) == (direction is Direction.BACKWARD)  # delta
    assert {b.name for b in before.buffers} - {b.name for b in after.buffers} >= {
        "out.0" if direction is Direction.FORWARD else "grad_q.0"
    }
    problem = case.plan().problem
    planned, placed = (workspace_map(x, problem).total_bytes for x in (before, after))
    assert placed < planned


def test_accumulators_of_several_attentions_stay() -> None:
    case = Case(
        4, 256, 256, heads=(2, 2), mask=Mask(), dtype=torch.bfloat16,
        options={"method": "ring"},
    )  # fmt: skip
    before, after = fused(case, 1, Direction.FORWARD)
    table = after.buffer_table()
    attends = [op for op in after.operations if isinstance(op, Attend)]
    assert len(attends) > 1
    assert {table[op.out.buffer].precision for op in attends} == {Precision.ACCUMULATE}
    assert num_merges(after) == num_merges(before)


def attentions(program: Program) -> list[AttendBackward]:
    return [op for op in program.operations if isinstance(op, AttendBackward)]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"method": "mesh", "chunks": (1, 1)}),
        (1, {"method": "mesh", "chunks": (2, 1)}),  # which read rows of their own
        (4, {"method": "allgather-kv"}),
    ],
)
@pytest.mark.parametrize("shown", [False, True])
def test_rows_that_stay_and_are_read_once_are_not_summed(
    world: int, options: dict[str, Any], shown: bool
) -> None:
    case = Case(world, 64, 64, heads=(2, 2), mask=Mask(causal=True), options=options)
    plan = case.plan()
    before = plan.program(world - 1, Direction.BACKWARD)
    after = placed(before, plan.problem, lse_gradient=False, shows_workspace=shown)
    assert all(op.out is None for op in attentions(before))
    assert attentions(after)
    for op in attentions(after):
        assert op.delta is None
        assert op.out is not None
        assert (op.out.start, op.out.stop) == (op.grad_out.start, op.grad_out.stop)
    planned, memory = (workspace_map(program, plan.problem) for program in (before, after))
    assert memory == planned if shown else memory.total_bytes <= planned.total_bytes
    kept = placed(before, plan.problem, lse_gradient=True, shows_workspace=shown)
    assert all(op.out is None for op in attentions(kept))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ring"},  # reads the same rows again and again
        {"method": "mesh", "tile": (2, 2)},  # sends them
        {"method": "ulysses"},
    ],
)
def test_rows_that_travel_or_are_read_again_are_summed_once(options: dict[str, Any]) -> None:
    case = Case(4, 64, 64, heads=(4, 4), mask=Mask(causal=True), options=options)
    before = case.plan().program(1, Direction.BACKWARD)
    assert without_row_sums(before) is before


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("method", ["mesh", "allgather-kv"])
def test_what_is_placed_is_still_proven(method: str, shown: bool) -> None:
    case = Case(4, 64, 64, heads=(4, 4), dtype=torch.bfloat16, options={"method": method})
    assert (
        verify(compile_plan(case.plan(), replace(SLOW_AND_ANY_MASK, shows_workspace=shown))) == []
    )
