"""Long calls in pieces: the same work, in as many calls as there are communications beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.program import Attention, Call, CallKind, Program
from mesh_attention.plan.passes.compile import compile_pass, compile_plan
from mesh_attention.plan.read.verify import verify
from support.targets import target_with

# It keeps transfers waiting forward, and leaves no SMs.
CUDNN = target_with("cudnn", "cudnn", None, own_stream=True)


def calls_of(program: Program) -> list[tuple[Call, ...]]:
    """Of all attentions, whichever kernel they are for."""
    return [
        tuple(replace(call, kernel="") for call in op.calls)
        for op in program.operations
        if isinstance(op, Attention)
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_in_pieces_is_still_proven(causal: bool) -> None:
    problem = Problem(1 << 18, 16, 128, mask=Mask(causal=causal))
    plan = make_plan(problem, 16, method="mesh", tile=(4, 4), head_slices=(2, 4))
    pieces = compile_plan(plan, CUDNN)
    assert verify(pieces) == []
    calls = [sum(map(len, calls_of(variant.forward.programs[0]))) for variant in (plan, pieces)]
    assert calls[1] > calls[0] or causal  # of several calls none may be long enough
    backward, whole = (variant.backward.programs for variant in (pieces, plan))
    assert list(map(calls_of, backward)) == list(map(calls_of, whole))


def test_pieces_are_rows_of_whole_tiles_and_large_enough_for_a_gpu() -> None:
    plan = make_plan(
        Problem(1 << 19, 64, 128),
        256,
        method="mesh",
        tile=(16, 16),
        head_slices=(8, 8),
        combine="reduce-scatter",
    )
    for calls in calls_of(compile_pass(plan, plan.forward, CUDNN).programs[0]):
        assert len(calls) == 5  # two gathers and three steps home for each slice
        assert [c.q_start for c in calls[1:]] == [c.q_stop for c in calls[:-1]]
        for call in calls:
            assert call.kind is CallKind.FULL
            assert call.q_start % 128 == 0
            assert (call.q_stop - call.q_start) // 128 * 8 >= 256


def test_short_calls_and_rings_stay_whole() -> None:
    for plan in (
        make_plan(Problem(1 << 10, 8, 64), 4, method="mesh", tile=(2, 2), head_slices=(1, 2)),
        make_plan(Problem(1 << 17, 64, 128), 8, method="ring"),
        make_plan(Problem(1 << 17, 64, 128), 8, method="ulysses", chunks=(1, 1)),  # nothing beside
    ):
        whole, compiled = plan.forward.programs, compile_pass(plan, plan.forward, CUDNN).programs
        assert list(map(calls_of, compiled)) == list(map(calls_of, whole))


def test_calls_stay_whole_where_nothing_has_to_wait_for_their_end() -> None:
    """The kernel lets transfers begin, or they share its stream."""
    problem = Problem(1 << 18, 16, 128)
    plan = make_plan(problem, 16, method="mesh", tile=(4, 4), head_slices=(2, 4))
    triton = target_with("triton", "triton", None, own_stream=True)
    for target in (triton, replace(CUDNN, own_stream=False), replace(CUDNN, two_streams=False)):
        compiled = compile_pass(plan, plan.forward, target).programs[0]
        assert calls_of(compiled) == calls_of(plan.forward.programs[0])


def test_an_exchange_on_either_side_makes_two_calls_of_one() -> None:
    plan = make_plan(Problem(1 << 16, 16, 128), 8, method="ulysses", head_slices=(1, 1))
    for calls in calls_of(compile_pass(plan, plan.forward, CUDNN).programs[0]):
        assert calls == tuple(
            Call(CallKind.FULL, start, start + (1 << 15), 0, 1 << 16) for start in (0, 1 << 15)
        )


def test_a_single_attention_stays_whole_as_nothing_travels_beside_it() -> None:
    plan = make_plan(Problem(1 << 16, 8, 128), 8, method="ulysses")
    compiled = compile_pass(plan, plan.forward, CUDNN).programs[0]
    assert calls_of(compiled) == calls_of(plan.forward.programs[0])
