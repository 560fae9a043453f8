"""Long calls in pieces: the same work, in as many calls as there are communications beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.program import Attend, AttendBackward, CallKind, Program
from mesh_attention.plan.split_calls import split_long_calls
from mesh_attention.plan.verify import verify
from mesh_attention.plan.workspace import workspace_map
from mesh_attention.runtime.streams import must_follow


def attentions(program: Program) -> list[Attend | AttendBackward]:
    return [op for op in program.operations if isinstance(op, Attend | AttendBackward)]


def in_pieces_everywhere(plan: Plan) -> Plan:
    passes = [
        replace(one, programs=tuple(split_long_calls(program) for program in one.programs))
        for one in plan.passes
    ]
    return replace(plan, passes=tuple(passes))


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_in_pieces_is_still_proven(causal: bool) -> None:
    problem = Problem(1 << 18, 16, 128, mask=Mask(causal=causal))
    plan = make_plan(problem, 16, method="mesh", tile=(4, 4), head_slices=(2, 4))
    pieces = in_pieces_everywhere(plan)
    assert verify(pieces) == []
    calls = [
        sum(len(op.calls) for op in attentions(one.forward.programs[0])) for one in (plan, pieces)
    ]
    assert calls[1] > calls[0] or causal  # of several calls none may be long enough
    assert pieces.direction(Direction.BACKWARD) == plan.direction(Direction.BACKWARD)


def test_pieces_are_rows_of_whole_tiles_and_large_enough_for_a_gpu() -> None:
    plan = make_plan(
        Problem(1 << 19, 64, 128),
        256,
        method="mesh",
        tile=(16, 16),
        head_slices=(8, 8),
        combine="reduce-scatter",
    )
    program = split_long_calls(plan.forward.programs[0])
    for op in attentions(program):
        assert len(op.calls) == 5  # two gathers and three steps home for each slice
        assert [c.q_start for c in op.calls[1:]] == [c.q_stop for c in op.calls[:-1]]
        for call in op.calls:
            assert call.kind is CallKind.FULL
            assert call.q_start % 128 == 0
            assert (call.q_stop - call.q_start) // 128 * 8 >= 256


def test_short_calls_and_rings_stay_whole() -> None:
    for plan in (
        make_plan(Problem(1 << 10, 8, 64), 4, method="mesh", tile=(2, 2), head_slices=(1, 2)),
        make_plan(Problem(1 << 17, 64, 128), 8, method="ring"),
    ):
        for program in plan.forward.programs:
            assert split_long_calls(program).operations == program.operations


def test_attention_joins_what_was_computed_right_before_it() -> None:
    """Delta is computed first; an attention that reads it as it lies must wait for it."""
    local = make_plan(Problem(64, 4, 8), 2, method="mesh", tile=(1, 2), chunks=(1, 2))
    program = local.backward.programs[0]
    first, *others = [at for at, op in enumerate(program.operations) if op in attentions(program)]
    assert must_follow(program.operations, workspace_map(program, local.problem)) == {first}
    assert others  # they run beside the call before them, long after delta
    gathered = make_plan(Problem(64, 4, 8), 2, method="mesh", tile=(2, 1))
    other = gathered.backward.programs[0]
    assert must_follow(other.operations, workspace_map(other, gathered.problem)) == set()
