"""Which calls leave multiprocessors to transfers, and for how long."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from mesh_attention.plan.leave_sms import SMS_OF_TRANSFERS, Leaving, _rounds, leave_sms

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.cost.machine.rates import Rates, usual_rates
from mesh_attention.plan.dependencies import dependencies
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.program import Attend, AttendBackward, CallKind
from mesh_attention.plan.verify import verify
from mesh_attention.plan.workspace import workspace_map
from mesh_attention.testing import run_local

SMS = 132
RATES = usual_rates()
FAST = replace(RATES, latency=0.0, peer=0.0, inside_bytes=1e15)  # next to no time for transfers
K = 1024


def leaving(
    plan: Plan, *, rates: Rates | None = None, backward: bool = False, split: bool = True
) -> Leaving:
    one = plan.direction(Direction.BACKWARD if backward else Direction.FORWARD)
    program = one.programs[0]
    waits = dependencies(program, workspace_map(program, plan.problem))
    return leave_sms(*(program, plan, one, waits), sms=SMS, rates=rates or RATES, split=split)


def attends(found: Leaving) -> dict[int, Attend]:
    return {at: op for at, op in enumerate(found.program.operations) if isinstance(op, Attend)}


def ring(tokens: int, heads: int = 8, *, causal: bool = False) -> Plan:
    return make_plan(Problem(tokens, heads, 128, mask=Mask(causal=causal)), 4, method="ring")


def test_a_long_call_leaves_sms_at_its_end_for_as_long_as_a_transfer_lasts() -> None:
    plan = ring(256 * K)
    found = leaving(plan)
    *beside, last = attends(found)
    assert set(found.calls) == {*beside}  # nothing is in flight beside the last
    for at in beside:
        first, rest = attends(found)[at].calls
        assert found.calls[at] == (False, True)
        assert first.q_stop == rest.q_start
        assert (rest.q_stop - rest.q_start) * 8 % (SMS - SMS_OF_TRANSFERS) == 0  # whole rounds
        # 64K rows of K and V on NVLink, 8 heads: 0.9 ms of the 26 that a call lasts.
        assert rest.q_stop - rest.q_start < 0.06 * rest.q_stop
    assert len(attends(found)[last].calls) == 1
    slower = leaving(plan, rates=replace(RATES, inside_bytes=RATES.inside_bytes / 8))
    at = beside[0]
    parts = [attends(one)[at].calls[1] for one in (found, slower)]
    assert parts[1].q_start < parts[0].q_start  # longer transfers, more rows
    far = leaving(plan, rates=replace(RATES, ranks_per_node=1))
    assert attends(far)[at].calls[1].q_start < parts[0].q_start  # between nodes


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_split_is_still_proven(causal: bool) -> None:
    plan = ring(256 * K, causal=causal)
    one = plan.forward
    programs = []
    for program in one.programs:
        waits = dependencies(program, workspace_map(program, plan.problem))
        programs.append(leave_sms(program, plan, one, waits, sms=SMS, rates=RATES).program)
    assert programs != list(one.programs)
    passes = (replace(one, programs=tuple(programs)), plan.backward)
    assert verify(replace(plan, passes=passes)) == []


def test_what_is_split_computes_the_same() -> None:
    plan = make_plan(Problem(4 * K, 1, 8, element_bytes=8), 2, method="ring")
    one = plan.forward
    programs = []
    for program in one.programs:
        waits = dependencies(program, workspace_map(program, plan.problem))
        few = leave_sms(program, plan, one, waits, sms=SMS_OF_TRANSFERS + 2, rates=FAST)
        assert (False, True) in few.calls.values()
        programs.append(few.program)
    split = replace(plan, passes=(replace(one, programs=tuple(programs)), plan.backward))
    q, k, v, grad = torch.randn(4, 1, 4 * K, 1, 8, dtype=torch.float64).unbind()
    found, wanted = (run_local(which, q, k, v, grad) for which in (split, plan))
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


def test_a_call_beside_a_transfer_that_lasts_as_long_leaves_sms_from_its_begin() -> None:
    found = leaving(ring(256 * K), rates=replace(RATES, inside_bytes=1e9))
    for at, leaves in found.calls.items():
        assert leaves == (True,)
        assert len(attends(found)[at].calls) == 1


def rounds_by_hand(first: int, leaving: int, sms: int) -> int:
    """Every SM by itself: when it has done its tiles of the first part, and those of the other on
    what transfers leave of them, the first that are free first."""
    free = sorted(first // sms + (sm < first % sms) for sm in range(sms))
    fewer = sms - SMS_OF_TRANSFERS
    tiles = [leaving // fewer + (program < leaving % fewer) for program in range(fewer)]
    ends = [at + n for at, n in zip(free[SMS_OF_TRANSFERS:], tiles, strict=True) if n]
    return max(free[-1], *ends)


def test_rounds_of_two_parts_are_counted_sm_by_sm() -> None:
    random = Random(0)
    for _ in range(2000):
        case = random.randint(1, 800), random.randint(1, 800), random.randint(18, 140)
        assert _rounds(*case) == rounds_by_hand(*case), case
    assert _rounds(400, 112, SMS) == 4  # in place of five: of the last round only four tiles


def test_a_call_of_four_rounds_is_split_though_its_heads_do_not_fill_the_last() -> None:
    """8 heads of 64 tiles: 112 of them leave SMs, and the rest has three rounds and four tiles."""
    found = leaving(ring(4 * 64 * 128), rates=FAST)
    at, leaves = next(iter(found.calls.items()))
    assert leaves == (False, True)
    first, rest = attends(found)[at].calls
    assert (first.q_stop - first.q_start, rest.q_stop - rest.q_start) == (50 * 128, 14 * 128)


def test_a_slice_of_a_gpu_has_none_to_leave() -> None:
    plan = ring(256 * K)
    one = plan.forward
    program = one.programs[0]
    waits = dependencies(program, workspace_map(program, plan.problem))
    found = leave_sms(program, plan, one, waits, sms=SMS_OF_TRANSFERS, rates=RATES)
    assert found == Leaving(program, {})


def test_a_call_of_a_round_stays_whole() -> None:
    found = leaving(ring(8 * K))
    assert found.program == ring(8 * K).forward.programs[0]
    assert all(leaves == (True,) for leaves in found.calls.values())


def test_causal_calls_leave_sms_where_a_transfer_lasts_half_as_long() -> None:
    plan = ring(256 * K, causal=True)
    for rates, expected in ((RATES, False), (replace(RATES, inside_bytes=5e9), True)):
        found = leaving(plan, rates=rates)
        at, op = next(iter(attends(found).items()))
        causal = [i for i, call in enumerate(op.calls) if call.kind is CallKind.CAUSAL]
        assert causal
        assert found.calls[at][causal[-1]] is expected


def test_backward_calls_and_kernels_that_leave_nothing_stay_whole() -> None:
    plan = ring(256 * K)
    backward = leaving(plan, backward=True)
    assert backward.program == plan.backward.programs[0]
    places = [
        at for at, op in enumerate(backward.program.operations) if isinstance(op, AttendBackward)
    ]
    assert set(backward.calls) <= set(places)
    assert leaving(plan, split=False).program == plan.forward.programs[0]


def test_gathers_and_exchanges_are_timed_by_the_links_that_they_take() -> None:
    """Where all ranks are nodes of their own, more rows leave SMs than inside one node."""
    problem = Problem(256 * K, 32, 128)
    for plan in (
        make_plan(problem, 8, method="mesh", tile=(2, 4), head_slices=(8, 8)),
        make_plan(problem, 8, method="usp"),
    ):
        rows = []
        for per_node in (8, 1):
            found = leaving(plan, rates=replace(RATES, ranks_per_node=per_node))
            rows.append(
                sum(
                    call.q_stop - call.q_start
                    for at, leaves in found.calls.items()
                    for call, one in zip(attends(found)[at].calls, leaves, strict=True)
                    if one
                )
            )
        assert 0 < rows[0] < rows[1], plan.method
