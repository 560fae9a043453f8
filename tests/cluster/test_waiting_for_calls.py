"""Kernels that hold the GPU until they end: a communication begins between two calls only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixed_costs import FixedCosts, undisturbed
from simulated_cases import compiled_rank

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import make_plan
from mesh_attention.cost import Cluster, Timeline, load_cluster, simulate
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend, Call, CallKind

FORWARD = (Direction.FORWARD,)


def only_cudnn(cluster: Cluster, waits: bool = True) -> Cluster:
    cudnn = cluster.kernels["cudnn"]
    assert cudnn.forward is not None
    forward = replace(cudnn.forward, lets_transfers_begin=not waits)
    return replace(cluster, kernels={"cudnn": replace(cudnn, forward=forward)})


def three_gathers(mask: Mask | None = None) -> Plan:
    problem = Problem(q_tokens=96, num_heads=2, head_dim=8, mask=mask or Mask())
    return make_plan(problem, 2, method="mesh", tile=(1, 2), chunks=(1, 3), directions=FORWARD)


def begins(timeline: Timeline, name: str) -> float:
    names = [op.name for op in timeline.pass_.programs[0].operations]
    return timeline.ranks[0].start[names.index(name)]


def test_a_communication_that_becomes_ready_during_a_call_waits_for_its_end() -> None:
    """AG-KV-0 until 1, then C-0-0 until 11 with AG-KV-1 beside it until 2; AG-KV-2 finds no SM
    before 11."""
    plan = three_gathers()
    free, held = (
        simulate(plan, undisturbed(), costs=FixedCosts(lambda _: 10.0, lambda _: 1.0, waits=waits))
        for waits in (False, True)
    )
    assert begins(free, "AG-KV-1") == begins(held, "AG-KV-1") == pytest.approx(1.0)
    assert begins(free, "AG-KV-2") == pytest.approx(2.0)
    assert begins(held, "AG-KV-2") == pytest.approx(11.0)
    assert held.runtime_seconds == pytest.approx(31.0)  # it was in time even so


def test_it_begins_between_two_calls_of_one_attention() -> None:
    """Under a causal zigzag C-0-0 has several calls, here all of one length."""
    plan = three_gathers(Mask(causal=True))
    op = next(op for op in plan.forward.programs[0].operations if op.name == "C-0-0")
    count = len(op.calls)  # type: ignore[union-attr]
    assert count > 1
    costs = FixedCosts(lambda _: 2.0 * count, lambda _: 1.0, waits=True)
    held = simulate(plan, undisturbed(), costs=costs)
    assert begins(held, "AG-KV-2") == pytest.approx(1.0 + 2.0)  # the end of its first call


def test_a_late_communication_is_waited_for() -> None:
    """AG-KV-1 lasts 3, until 4; C-0-0 until 11 keeps AG-KV-2 back; it lasts until 14, C-0-1 until
    12: C-0-2 begins at 14 and not at 12."""
    seconds = {"AG-KV-0": 1.0, "AG-KV-1": 3.0, "AG-KV-2": 3.0, "C-0-0": 10.0}
    plan = three_gathers()
    free, held = (
        simulate(
            plan,
            undisturbed(),
            costs=FixedCosts(
                lambda name: seconds.get(name, 1.0),
                lambda name: seconds.get(name, 0.0),
                waits=waits,
            ),
        )
        for waits in (False, True)
    )
    assert begins(free, "C-0-2") == pytest.approx(12.0)
    assert begins(held, "C-0-2") == pytest.approx(14.0)


def test_strict_steps_begin_together_and_nothing_waits() -> None:
    plan = three_gathers()
    runtimes = [
        simulate(
            plan,
            undisturbed(),
            overlap="strict",
            costs=FixedCosts(lambda _: 10.0, lambda _: 1.0, waits=waits),
        ).runtime_seconds
        for waits in (False, True)
    ]
    assert runtimes[0] == pytest.approx(runtimes[1])


def test_chunks_inside_slices_are_worse_where_communications_wait() -> None:
    """As measured on an H200 (benchmarks/NOTES.md): with twice as many gathers, each of which waits
    for a call, causal forward took 39 in place of 33 ms."""
    problem = Problem(1 << 18, 64, 128, mask=Mask(causal=True))

    def ratio(cluster: Cluster) -> float:
        uncut, halved = (
            simulate(
                plan_on(
                    *(cluster, problem, 64),
                    method="mesh",
                    tile=(8, 8),
                    head_slices=(4, 16),
                    chunks=chunks,
                    directions=FORWARD,
                ),
                cluster,
            ).runtime_seconds
            for chunks in ((1, 1), (1, 2))
        )
        return halved / uncut

    hgx = load_cluster("hgx-h100")
    assert ratio(only_cudnn(hgx)) > 1.1
    assert ratio(only_cudnn(hgx, waits=False)) < 1.05


def test_a_call_that_may_leave_sms_keeps_transfers_waiting_where_it_does_not() -> None:
    """FlashAttention 3 on two ranks; where it leaves SMs it loses them beside a transfer."""
    cluster = load_cluster("hgx-h100")
    flash = replace(cluster, kernels={"flash_attn3": cluster.kernels["flash_attn3"]})
    plan = make_plan(Problem(65536, 64, 128), 2, method="ring", directions=FORWARD)
    program, costs = compiled_rank(plan, flash, Direction.FORWARD)
    op = next(op for op in program.operations if isinstance(op, Attend))
    whole = Call(CallKind.FULL, 0, op.q.num_rows, 0, op.k.num_rows, kernel="flash_attn3")
    keeps, leaves = (
        costs.compute(replace(op, calls=(replace(whole, leave_sms=sms),)), program.buffer_table())[
            0
        ]
        for sms in (0, 16)
    )
    assert (keeps.waits, leaves.waits) == (True, False)
    assert leaves.lost == pytest.approx(16 / 132)
    assert leaves.seconds == keeps.seconds


def test_one_rank_expects_of_whole_calls_what_the_simulation_finds() -> None:
    cluster = load_cluster("hgx-h100")
    problem = Problem(65536, 64, 128, num_kv_heads=8, mask=Mask(causal=True))
    for chunks in ((1, 1), (2, 1), (4, 1), (8, 1)):
        plan = plan_on(cluster, problem, 8, method="ulysses", directions=FORWARD, chunks=chunks)
        simulated_seconds = simulate(plan, cluster).runtime_seconds
        seen = estimate(plan, cluster, Direction.FORWARD, ranks=(0, 7))
        assert seen.least_seconds <= simulated_seconds
        assert seen.seconds == pytest.approx(simulated_seconds, rel=0.01)
