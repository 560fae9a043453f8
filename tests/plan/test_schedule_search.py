"""Search finds an order at least as fast as greedy's, quickly, and says honestly how good it is."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from schedule_graphs import Builder, backward_graph, forward_graph, golden_graph, random_graph

from mesh_attention.plan.language.tasks import TaskGraph, check_schedule
from mesh_attention.plan.schedule.greedy import greedy
from mesh_attention.plan.schedule.search import PartialSchedule, Tables, event_makespan, search

FORWARD, BACKWARD = 8_000, 10_000  # partial schedules


def test_the_result_is_valid_never_worse_than_greedy_and_timed_exactly() -> None:
    for seed in range(60):
        graph = random_graph(Random(seed), largest=3)
        result = search(graph, beam_width=16)
        check_schedule(graph, result.schedule, strict=False)
        assert event_makespan(graph, result.schedule) == result.makespan
        assert event_makespan(graph, greedy(graph)) == result.greedy_makespan
        assert result.lower_bound <= result.makespan <= result.greedy_makespan
        assert result.greedy_makespan >= result.makespan


def test_the_same_graph_gives_the_same_result() -> None:
    for seed in range(5):
        graph = random_graph(Random(seed), largest=3)
        assert search(graph) == search(graph)


def test_the_golden_example_is_optimal_already() -> None:
    result = search(golden_graph())
    assert result.makespan == 7.0
    assert result.proven_optimal


def test_backward_of_equal_chunks_gains_from_search() -> None:
    graph = backward_graph(4, 4, lambda name: 1.0, lambda q, kv: 1.0)
    result = search(graph)
    assert (result.makespan, result.greedy_makespan) == (20.0, 23.0)
    assert result.proven_optimal
    assert result.greedy_makespan / result.makespan == pytest.approx(1.15)


@pytest.mark.parametrize(("build", "most"), [(forward_graph, FORWARD), (backward_graph, BACKWARD)])
def test_four_by_four_chunks_take_few_partial_schedules(
    build: Builder, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second on one ARM core: counted, since a busy machine takes longer for as many."""
    rng, place = Random(7), Tables._place
    made: list[None] = []
    graph = build(4, 4, lambda n: rng.uniform(0.5, 1.5), lambda q, kv: rng.uniform(0.2, 1.8))

    def counted(*arguments: Any) -> PartialSchedule:
        made.append(None)
        return place(*arguments)

    monkeypatch.setattr(Tables, "_place", counted)
    search(graph)
    assert 0 < len(made) <= most, len(made)


def test_a_wider_beam_never_claims_a_bound_above_a_makespan_found() -> None:
    for seed in range(20):
        graph = random_graph(Random(1000 + seed), largest=3)
        narrow, wide = search(graph, beam_width=1), search(graph, beam_width=64)
        assert narrow.lower_bound <= wide.makespan * (1 + 1e-9)
        assert wide.lower_bound <= narrow.makespan * (1 + 1e-9)


def test_an_empty_graph_takes_no_time() -> None:
    result = search(TaskGraph((), ()))
    assert (result.makespan, result.greedy_makespan, result.proven_optimal) == (0.0, 0.0, True)


def test_a_beam_of_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_width"):
        search(golden_graph(), beam_width=0)
