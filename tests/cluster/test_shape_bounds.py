"""What is known of a shape without a plan: a bound, and the rank that ends last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention.choose.busiest import busiest_ranks, corner_ranks
from mesh_attention.choose.scored import SEARCH, SearchQuestion
from mesh_attention.choose.shapes import shapes_of
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.operation_costs import Overlap, compiled_on
from mesh_attention.cost.planning import default_layout, plan_on
from mesh_attention.cost.simulator import seconds_of_few
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

PAPER = load_cluster("paper")
NODES_OF_4 = replace(
    PAPER, node=replace(PAPER.node, ranks=4), network=replace(PAPER.network, nics=4)
)
RANKS = 6  # one node and a half
K = 1024
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(2 * K, 0)),
    "documents": Mask(causal=True, documents=(0, K, 20 * K, 23 * K, 24 * K)),
}
SOME = [pytest.param(mask, marks=[pytest.mark.slow] * (mask == "window")) for mask in MASKS]


@pytest.mark.parametrize("mask", SOME)
def test_no_simulation_is_shorter_than_the_bound_of_its_shape(mask: str) -> None:
    problem = Problem(24 * K, 12, 64, num_kv_heads=4, mask=MASKS[mask])
    layout = default_layout(problem)
    for direction in Direction:
        asked = SearchQuestion(problem, RANKS, NODES_OF_4, {}, [*METHODS], SEARCH)
        shapes = shapes_of(asked, direction, layout)
        assert len({shape.name for shape in shapes}) == len(METHODS)
        bounds = []
        for shape in shapes:
            how = {"method": shape.name, "directions": (direction,), **shape.options}
            try:
                plan = plan_on(NODES_OF_4, problem, RANKS, **how)
            except PlanError:
                continue
            seconds = simulate(plan, NODES_OF_4, direction).runtime_seconds
            assert shape.least_seconds <= seconds, (shape, seconds)
            bounds.append(shape.least_seconds)
        assert len({*bounds}) > 1  # they tell shapes apart


@pytest.mark.parametrize("mask", SOME)
def test_an_estimate_looks_at_the_rank_that_ends_last(mask: str) -> None:
    problem = Problem(24 * K, 12, 64, num_kv_heads=4, mask=MASKS[mask])
    for method, options in (
        ("mesh", {"tile": (3, 2)}),
        ("mesh", {"tile": (2, 3)}),
        ("mesh-usp", {"ulysses": 2, "tile": (1, 3)}),
        ("seen", {"tile": (3, 2)}),
        ("seen", {"tile": (1, 6)}),
    ):
        plan = plan_on(NODES_OF_4, problem, RANKS, method=method, **options)
        ranks = busiest_ranks(plan, method, options, 4)
        assert len(ranks) <= 3
        for direction in Direction:
            some = estimate(plan, NODES_OF_4, direction, ranks=sorted(ranks)).seconds
            every = estimate(plan, NODES_OF_4, direction, ranks=range(RANKS)).seconds
            assert some >= 0.93 * every, (method, options, direction, ranks, some / every)


@pytest.mark.parametrize("tile", [(2, 4), (4, 2), (1, 8)])
def test_ranks_in_the_corners_of_the_grid_show_how_long_all_wait(tile: tuple[int, int]) -> None:
    """Chunks of a zigzag: one rank by itself sees up to a fifth too little."""
    problem = Problem(64 * K, 8, 128, mask=MASKS["causal"])
    setting = {"tile": tile, "chunks": (2, 2)}
    for direction in Direction:
        plan = plan_on(PAPER, problem, 8, method="mesh", directions=(direction,), **setting)
        corners = corner_ranks(plan, "mesh", setting)
        seconds = simulate(plan, PAPER, direction).runtime_seconds
        compiled = compiled_on(plan, direction, PAPER)
        seen = seconds_of_few(compiled, PAPER, corners, Overlap.EVENTS)
        assert len(corners) < plan.num_ranks
        assert 0.97 * seconds <= seen <= 1.0001 * seconds, (direction, seen, seconds)
