"""Ranks that do the same with other heads: one of them is simulated, to the same timeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_attention.cost import load_cluster
from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.shared_work import ranks_to_simulate
from mesh_attention.cost.simulator import simulate
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

HGX = load_cluster("hgx-h100")
CAUSAL, FULL = Mask(causal=True), Mask()


def plan_of(ranks: int, method: str, mask: Mask = CAUSAL, **options: Any) -> Plan:
    problem = Problem(512 * ranks, 32, 64, num_kv_heads=16, mask=mask)
    return plan_on(HGX, problem, ranks, method=method, **options)


def simulated(plan: Plan, direction: Direction, cluster: Cluster = HGX) -> int:
    return len(ranks_to_simulate(plan, plan.direction(direction), cluster, Overlap.EVENTS))


@pytest.mark.parametrize(
    ("mask", "direction"),
    [
        (CAUSAL, Direction.BACKWARD),
        (FULL, Direction.FORWARD),
        pytest.param(CAUSAL, Direction.FORWARD, marks=pytest.mark.slow),
        pytest.param(FULL, Direction.BACKWARD, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("ranks", "method", "options"),
    [
        (32, "ulysses", {"chunks": (1, 1)}),
        (32, "ulysses", {}),
        (32, "mesh-usp", {"ulysses": 8, "tile": (2, 2), "chunks": (2, 2)}),
        (32, "mesh-usp", {"ulysses": 16, "tile": (1, 2), "units_per_node": 2, "chunks": (2, 2)}),
        (32, "mesh-usp", {"ulysses": 4, "tile": (2, 4), "units_per_node": 8, "chunks": (1, 2)}),
        (64, "mesh-usp", {"ulysses": 4, "tile": (4, 4), "alpha": 2, "chunks": (1, 1)}),
        (32, "usp", {"ulysses": 16, "units_per_node": 2}),
        (24, "mesh-usp", {"ulysses": 8, "tile": (1, 3), "combine": "nodes"}),
    ],
)
def test_one_rank_of_each_unit_has_the_timeline_of_all(
    ranks: int, method: str, options: dict[str, Any], mask: Mask, direction: Direction
) -> None:
    plan = plan_of(ranks, method, mask, **options)
    pass_ = plan.direction(direction)
    assert simulated(plan, direction) == ranks // pass_.copies < ranks
    quick = simulate(plan, HGX, direction)
    every = replace(plan, passes=tuple(replace(x, copies=1) for x in plan.passes))
    assert simulated(every, direction) == ranks
    slow = simulate(every, HGX, direction)
    assert quick.runtime_seconds == pytest.approx(slow.runtime_seconds, rel=1e-12)
    for quick_rank, slow_rank in zip(quick.ranks, slow.ranks, strict=True):
        assert quick_rank.start == pytest.approx(slow_rank.start, rel=1e-12, abs=1e-15)
        assert quick_rank.end == pytest.approx(slow_rank.end, rel=1e-12, abs=1e-15)
    assert quick.received_bytes == slow.received_bytes
    assert quick.far_bytes == slow.far_bytes
    assert quick.workspace_bytes == slow.workspace_bytes
    assert quick.kernel_seconds == pytest.approx(slow.kernel_seconds)


@pytest.mark.parametrize(
    ("ranks", "method", "options"),
    [
        (32, "mesh", {}),  # nobody exchanges heads
        (32, "usp", {"ulysses": 8}),  # what goes round divides the links of nodes
        (24, "mesh-usp", {"ulysses": 4, "tile": (2, 3), "relayout": True}),
        (24, "ulysses", {"chunks": (1, 1)}),  # shares of 32 heads that differ
        (32, "mesh-usp", {"ulysses": 2, "tile": (2, 8)}),
    ],
)
def test_all_ranks_are_simulated_where_some_may_differ(
    ranks: int, method: str, options: dict[str, Any]
) -> None:
    cluster = HGX
    if options.get("ulysses") == 2:  # ranks of other head groups have the same NIC
        cluster = replace(HGX, network=replace(HGX.network, nics=1))
    plan = plan_of(ranks, method, **options)
    for direction in Direction:
        assert simulated(plan, direction, cluster) == ranks


def test_units_that_nodes_cut_unlike_are_simulated_with_all_ranks() -> None:
    """Three units of 4 on nodes of 6: the second is in two of them."""
    cluster = replace(HGX, node=replace(HGX.node, ranks=6))
    problem = Problem(512 * 12, 32, 64, mask=CAUSAL)
    plan = plan_on(cluster, problem, 12, method="mesh-usp", ulysses=4, tile=(1, 3))
    assert simulated(plan, Direction.FORWARD, cluster) == 12
