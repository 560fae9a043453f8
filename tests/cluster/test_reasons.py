"""The sentence about a choice says what is known, and calls it by its name."""

from __future__ import annotations

from mesh_attention.choose.auto import find_best_of_all
from mesh_attention.choose.best import find_best
from mesh_attention.choose.one_pass import Standing
from mesh_attention.choose.reasons import why
from mesh_attention.cost.machine.load import load_cluster
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.simulator import simulate
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem


def standing(name: str, problem: Problem) -> Standing:
    cluster, only = load_cluster("hgx-h100"), (Direction.FORWARD,)
    options = {"layout": "contiguous"}
    plan = plan_on(cluster, problem, 4, method=name, directions=only, **options)
    timeline = simulate(plan, cluster, Direction.FORWARD)
    return Standing(name, options, timeline.runtime_seconds, timeline)


UNEVEN = Problem(32768, 4, 64, mask=Mask(documents=(0, *range(8192, 32769, 1024))))


def test_waiting_for_slower_ranks_is_no_communication() -> None:
    seen, ring = standing("seen", UNEVEN), standing("ring", Problem(512, 4, 64))
    assert "receives nothing, and it waits" in why([seen], [[seen]])
    assert "ms for slower ranks" in why([seen], [[seen]])
    assert "of communication stay open" not in why([seen], [[seen]])
    assert "ms of communication stay open" in why([ring], [[ring]])


def test_times_are_simulated_or_bounds_of_what_a_search_of_the_method_finds() -> None:
    problem = Problem(65536, 8, 64, mask=Mask(causal=True))
    found = find_best_of_all(problem, 8, "paper", directions=(Direction.FORWARD,))
    standings = found.standings[Direction.FORWARD]
    bounds = [one for one in standings if one.is_bound]
    assert [*standings[len(standings) - len(bounds) :]] == bounds
    for one in standings:
        assert one.timeline is None or one.seconds == one.timeline.runtime_seconds
    assert {one.name for one in bounds} >= {"ring", "startrail"}
    for one in bounds:
        assert one.seconds >= found.seconds
        if one.name in ("ring", "startrail"):
            best = find_best(problem, 8, "paper", method=one.name)
            assert one.seconds <= best.timeline.runtime_seconds


def test_the_sentence_compares_with_what_is_known() -> None:
    ring, mesh = (standing(name, Problem(512, 4, 64)) for name in ("ring", "mesh"))
    best, second = sorted((ring, mesh), key=lambda one: one.seconds)
    bound = Standing("usp", {}, 1.01 * best.seconds)
    assert f"{best.name} beats {second.name} by " in why([best], [[best, second, bound]])
    assert f"{best.name} is at least 0.99 % before all other" in why([best], [[best, bound]])
    near = Standing("ulysses", {}, best.seconds)
    assert f"{best.name} is not slower than any other" in why([best], [[best, bound, near]])
