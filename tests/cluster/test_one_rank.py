"""What one rank sees: never above the simulation as a bound, and near it as an estimate."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.estimate import _LinkSharing, estimate
from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.planning import plan_on
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.passes.seconds import TransferCosts

PAPER = load_cluster("paper")
SMALL = replace(PAPER, node=replace(PAPER.node, ranks=2), network=replace(PAPER.network, nics=1))


@pytest.mark.parametrize("method", METHODS)
def test_no_simulation_is_shorter_than_the_bound_or_needs_less_memory(method: str) -> None:
    random = Random(method)
    problem = problem_of(random.choice((8192, 65536)))
    shape = random.choice(METHODS[method].candidates(problem, 8, 2))
    plan = plan_on(SMALL, problem, 8, method=method, **shape)
    for direction in Direction:
        for cluster, overlap in (
            (SMALL, random.choice(list(Overlap))),
            (replace(SMALL, host_driven=True), Overlap.EVENTS),
        ):
            seen = estimate(plan, cluster, direction, ranks=range(8), overlap=overlap)
            timeline = simulate(plan, cluster, direction, overlap=overlap)
            assert seen.least_seconds <= timeline.runtime_seconds
            assert seen.peak_bytes <= timeline.peak_bytes
            operations = sum(len(p.operations) for p in timeline.pass_.programs)
            assert 0.5 < operations / seen.num_operations <= 1.1  # ranks leave out other copies


def test_the_estimate_is_near_the_simulation() -> None:
    hgx = load_cluster("hgx-h100")
    for method in ("mesh", "ring", "usp"):
        plan = plan_on(hgx, problem_of(131072), 16, method=method)
        for direction in Direction:
            seen = estimate(plan, hgx, direction, ranks=(0, 7, 15))
            exact = simulate(plan, hgx, direction).runtime_seconds
            assert seen.least_seconds <= seen.seconds
            assert seen.seconds == pytest.approx(exact, rel=0.03)
            driven = replace(hgx, host_driven=True)
            at_once = simulate(plan, driven, direction).runtime_seconds
            seen = estimate(plan, driven, direction, ranks=(0, 7, 15))
            assert seen.seconds == pytest.approx(at_once, rel=0.03)


def test_alone_there_is_nothing_to_wait_for() -> None:
    plan = plan_on(PAPER, problem_of(8192), 1, method="mesh")
    seen = estimate(plan, PAPER, Direction.FORWARD, ranks=(0,))
    exact = simulate(plan, PAPER).runtime_seconds
    assert seen.seconds == pytest.approx(exact)
    assert seen.least_seconds == pytest.approx(exact)


def test_a_flow_between_the_same_places_of_two_nodes_is_one_of_as_many_as_a_node_has_ranks() -> (
    None
):
    """Four ranks a node, which sends one flow at a time: the others of its group send too where
    every member sends to its own place in the next node, and none where the last sends to the
    first."""
    rate = PAPER.network.peer.gb_per_second
    network = replace(PAPER.network, nics=4, peer_node_gb_per_second=rate)
    cluster = replace(PAPER, node=replace(PAPER.node, ranks=4), network=network)
    group = tuple(range(8))
    plan: Any = SimpleNamespace(devices=group)
    pass_: Any = SimpleNamespace(
        groups={"all": group}, members={"all": {rank: rank for rank in group}}
    )
    transfers = TransferCosts(cluster.links, plan, pass_)
    compiled: Any = SimpleNamespace(plan=plan, pass_=pass_, transfers=transfers)
    sharing = _LinkSharing(cluster, compiled)
    assert [sharing.flow("all", 3, ends) for ends in ((3, 7), (3, 4))] == [4.0, 1.0]
