"""The search: never worse than the method's own choice, faithful to what was given, repeatable."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention.choose import best
from mesh_attention.choose.best import Best, find_best
from mesh_attention.choose.explored import Explored
from mesh_attention.choose.search import a_search
from mesh_attention.cost import Cluster, load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction

PAPER = load_cluster("paper")
# Two nodes are enough to have links of two kinds, and small ones enough to have two.
SMALL = replace(PAPER, node=replace(PAPER.node, ranks=2), network=replace(PAPER.network, nics=2))
RANKS = 4
PROBLEM = problem_of(65536)


@cache
def best_of(method: str, direction: Direction) -> Best:
    return find_best(PROBLEM, RANKS, SMALL, method=method, direction=direction)


@pytest.mark.parametrize("direction", [Direction.BACKWARD])
@pytest.mark.parametrize("method", METHODS)
def test_the_best_is_at_least_as_fast_as_the_methods_own_choice(
    method: str, direction: Direction
) -> None:
    default = plan_on(SMALL, PROBLEM, RANKS, method=method, directions=(direction,))
    usual = simulate(default, SMALL, direction).runtime_seconds
    best = best_of(method, direction)
    assert best.timeline.runtime_seconds <= usual
    plan = plan_on(SMALL, PROBLEM, RANKS, method=method, directions=(direction,), **best.options)
    again = simulate(plan, SMALL, direction)
    assert again.runtime_seconds == best.timeline.runtime_seconds


@pytest.mark.slow
def test_the_climb_finds_what_trying_everything_finds() -> None:
    """In one layout: others are searched like it."""
    options = {"layout": "zigzag"}
    best = find_best(PROBLEM, RANKS, SMALL, method="mesh", options=options)
    everything = []
    for shape in METHODS["mesh"].candidates(PROBLEM, RANKS, SMALL.node.ranks):
        for kq, kkv, heads in product((1, 2, 4), (1, 2, 4), (None, (1, 4), (2, 8))):
            cut: dict[str, Any] = {"chunks": (kq, kkv)} | ({"head_slices": heads} if heads else {})
            plan = plan_on(
                SMALL,
                PROBLEM,
                RANKS,
                method="mesh",
                directions=(Direction.FORWARD,),
                **cut,
                **shape,
            )
            everything.append(simulate(plan, SMALL).runtime_seconds)
    assert best.timeline.runtime_seconds <= 1.01 * min(everything)
    assert best.tried < len(everything) / 2


@pytest.mark.parametrize(("most", "ranks_that_look"), [(0, 3), (10**9, 1)])
def test_where_few_can_be_simulated_more_ranks_look_at_the_best(
    most: int, ranks_that_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a causal mask chunks leave ranks more work than the one in the middle has."""
    monkeypatch.setattr(best, "MAX_SIMULATED_OPERATIONS", most)
    search = a_search(problem_of(131072, heads=2), RANKS, SMALL, Direction.FORWARD, None)
    explored = Explored(search, "mesh")
    explored.try_shapes()
    explored.try_cuts()
    by_one = explored.all_in_order()
    by_three = [
        one._replace(expected=best.candidate(search, "mesh", one.setting).expected)
        for one in by_one[: best.NUM_SEEN_AGAIN]
    ] + by_one[best.NUM_SEEN_AGAIN :]
    seen_again = min(by_three, key=lambda one: one.expected)
    assert seen_again.setting != by_one[0].setting
    first = next(best.finalists(search, explored))
    assert first[2] == (by_one[0] if ranks_that_look == 1 else seen_again).setting


def test_what_is_given_stays() -> None:
    best = find_best(
        problem_of(65536), 16, PAPER, method="mesh", options={"tile": (2, 8), "chunks": (1, 2)}
    )
    assert best.timeline.one.setting["tile"] == "2x8"
    assert best.timeline.one.setting["chunks"] == "1x2"
    best = find_best(problem_of(65536), 16, PAPER, method="mesh-usp", options={"ulysses": 16})
    assert best.timeline.one.setting["ulysses"] == "16"


def test_shapes_are_searched_where_the_cut_is_given() -> None:
    cut: dict[str, Any] = {"chunks": (1, 1), "head_slices": (2, 8)}
    best = find_best(problem_of(65536), 16, PAPER, method="mesh", options=cut)
    assert best.options.items() >= cut.items()
    assert best.options.keys() - cut.keys() <= {"tile", "alpha"}
    assert best.tried > 3


def with_memory(num_bytes: float) -> Cluster:
    return replace(SMALL, gpu=replace(SMALL.gpu, memory_gib=num_bytes / 2**30))


def test_what_fits_into_memory_wins() -> None:
    free = best_of("mesh", Direction.FORWARD).timeline
    smaller = with_memory(free.peak_bytes - 1)
    fitting = find_best(PROBLEM, RANKS, smaller, method="mesh").timeline
    assert fitting.peak_bytes < free.peak_bytes
    assert fitting.runtime_seconds >= free.runtime_seconds
    none = find_best(PROBLEM, RANKS, with_memory(1), method="mesh").timeline
    assert none.runtime_seconds > 0  # still an answer


def test_a_refusal_of_everything_is_the_methods_own() -> None:
    with pytest.raises(PlanError, match="tiles that fit"):
        find_best(problem_of(), 16, PAPER, method="mesh", options={"tile": (3, 3)})
    with pytest.raises(PlanError, match="has no option 'tile'"):
        find_best(problem_of(), 16, PAPER, method="ring", options={"tile": (4, 4)})
    with pytest.raises(PlanError, match="known methods"):
        find_best(problem_of(), 16, PAPER, method="rng")


def test_progress_grows_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    find_best(
        problem_of(),
        8,
        PAPER,
        method="mesh",
        progress=lambda done, total: told.append((done, total)),
    )
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total in told)
