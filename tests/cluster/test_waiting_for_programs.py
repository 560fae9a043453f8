"""Transfers that come in the middle of a call whose programs run to their end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_cases import timed_calls

from mesh_attention.cost import Cluster, load_cluster, simulate
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.operation_costs import TimedCall
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

PAPER = load_cluster("paper")
K = 1024


def single_kernel_cluster(
    cluster: Cluster, *, tile_keys: int | None, slowdown: float | None
) -> Cluster:
    """With one kernel, of which this is said of the backward pass."""
    only = cluster.kernels["cudnn_ranges"]
    assert only.backward is not None
    backward = replace(only.backward, tile_keys=tile_keys, slowdown=slowdown)
    return replace(cluster, kernels={"cudnn_ranges": replace(only, backward=backward)})


@pytest.mark.parametrize(
    ("left", "until"), [(3.0, 0.0), (2.5, 0.5), (2.1, 0.1), (2.0, 0.0), (0.25, 0.25), (0.0, 0.0)]
)
def test_a_transfer_waits_for_the_programs_that_run(left: float, until: float) -> None:
    assert TimedCall(3.0, round=1.0).until_sms(left) == pytest.approx(until)
    assert TimedCall(3.0).until_sms(left) == 0.0
    # What rounding leaves is nothing, on either side.
    assert TimedCall(3.0, round=0.1).until_sms(3 * 0.1) == 0.0


def test_a_round_is_that_of_all_programs_over_all_sms() -> None:
    """64K keys of 2 heads, 128 keys a program: 1,024 programs, 8 rounds of 132."""
    plan = plan_on(PAPER, Problem(64 * K, 2, 128), 2, method="ring")
    cluster = single_kernel_cluster(PAPER, tile_keys=64, slowdown=0.3)
    (call,) = timed_calls(plan, cluster, Direction.BACKWARD)
    assert call.lost == 0.3
    assert call.seconds / call.round == pytest.approx(2 * 8, rel=0.1)  # two ends a round, and sums
    none = single_kernel_cluster(PAPER, tile_keys=None, slowdown=None)
    (call,) = timed_calls(plan, none, Direction.BACKWARD)
    assert (call.round, call.lost) == (0.0, None)


def test_all_ranks_and_one_wait_for_programs_alike() -> None:
    """Where work is alike on all of them."""
    problem = Problem(256 * K, 16, 128, mask=Mask(causal=True))
    options: dict[str, Any] = {"ulysses": 4, "tile": (8, 1), "units_per_node": 8}
    options |= {"chunks": (2, 2), "head_slices": (1, 1), "even_chunks": True, "keep": "shards"}
    plan = plan_on(PAPER, problem, 32, method="mesh-usp", **options)
    seconds = []
    for tile_keys in (None, 128):
        cluster = single_kernel_cluster(PAPER, tile_keys=tile_keys, slowdown=0.12)
        simulated_seconds = simulate(plan, cluster, "backward").runtime_seconds
        seen = estimate(plan, cluster, Direction.BACKWARD, ranks=(0,)).seconds
        assert seen == pytest.approx(simulated_seconds)
        seconds.append(simulated_seconds)
    assert seconds[1] > 1.05 * seconds[0]


def test_what_a_kernel_loses_is_said_for_it_or_for_all() -> None:
    problem = Problem(64 * K, 8, 128)
    plan = plan_on(PAPER, problem, 16, method="ring")
    usual, none, most = (
        simulate(
            plan, single_kernel_cluster(PAPER, tile_keys=None, slowdown=slowdown), "backward"
        ).runtime_seconds
        for slowdown in (None, 0.0, 0.9)
    )
    assert none < usual < most
