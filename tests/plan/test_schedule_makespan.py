"""Times of schedules: steps as in the paper, events as the runtime runs them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from schedule_graphs import communication, compute, golden_graph, random_graph, strict_makespan

from mesh_attention.plan.language.tasks import Schedule, TaskGraph
from mesh_attention.plan.schedule.greedy import greedy
from mesh_attention.plan.schedule.search import (
    event_makespan,
    event_times,
    lower_bound,
    one_machine_bound,
)


def test_events_are_never_later_than_steps_over_500_random_graphs() -> None:
    for seed in range(500):
        graph = random_graph(Random(seed))
        schedule = greedy(graph)
        events, steps = event_makespan(graph, schedule), strict_makespan(graph, schedule)
        assert events <= steps * (1 + 1e-12), (seed, events, steps)


def test_events_are_earlier_when_one_half_of_a_step_is_short() -> None:
    graph = TaskGraph(
        (
            communication("AG-KV-0", 1.0),
            communication("AG-KV-1", 1.0),
        ),
        (
            compute("C-0-0", 4.0, "AG-KV-0"),
            compute("C-0-1", 1.0, "AG-KV-1"),
            compute("C-1-0", 1.0),
        ),
    )
    schedule = Schedule.parse("1 AG-KV-0 + C-1-0\n2 AG-KV-1 + C-0-0\n3 compute only C-0-1")
    assert strict_makespan(graph, schedule) == 6.0
    assert {str(task): span for task, span in event_times(graph, schedule).items()} == {
        "AG-KV-0": (0.0, 1.0),
        "C-1-0": (0.0, 1.0),
        "AG-KV-1": (1.0, 2.0),
        "C-0-0": (1.0, 5.0),
        "C-0-1": (5.0, 6.0),
    }
    assert event_makespan(graph, schedule) == 6.0
    slow = Schedule.parse(
        "1 AG-KV-0\n2 AG-KV-1 + C-1-0\n3 compute only C-0-0\n4 compute only C-0-1"
    )
    assert strict_makespan(graph, slow) == 7.0
    assert event_makespan(graph, slow) == 6.0


def test_lanes_never_run_two_tasks_at_once_and_needs_end_first() -> None:
    for seed in range(100):
        graph = random_graph(Random(seed))
        times = event_times(graph, greedy(graph))
        for lane in (graph.communication, graph.compute):
            spans = sorted(times[task.task] for task in lane)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
        for name, needs in graph.needs().items():
            assert all(times[need][1] <= times[name][0] for need in needs)


def test_no_schedule_is_faster_than_the_lower_bound() -> None:
    for seed in range(300):
        graph = random_graph(Random(seed))
        assert lower_bound(graph) <= event_makespan(graph, greedy(graph)) * (1 + 1e-12)


def test_a_schedule_that_breaks_the_order_has_no_makespan() -> None:
    graph = golden_graph()
    backwards = Schedule(greedy(graph).steps[::-1])
    with pytest.raises(ValueError, match="starts RS-Q-2 before"):
        event_makespan(graph, backwards)
    with pytest.raises(ValueError, match="starts RS-Q-2 before"):
        strict_makespan(graph, backwards)


def test_an_empty_graph_takes_no_time() -> None:
    graph = TaskGraph((), ())
    assert event_makespan(graph, Schedule(())) == strict_makespan(graph, Schedule(())) == 0.0
    assert lower_bound(graph) == 0.0


@pytest.mark.parametrize(
    ("jobs", "bound"),
    [
        ([], 0.0),
        ([(2.0, 3.0, 4.0)], 9.0),
        ([(0.0, 3.0, 0.0), (1.0, 1.0, 0.0), (2.0, 1.0, 0.0)], 5.0),  # all work, without a gap
        ([(0.0, 1.0, 0.0), (5.0, 1.0, 0.0)], 6.0),  # a gap
        ([(0.0, 4.0, 1.0), (1.0, 2.0, 6.0)], 9.0),  # the first is interrupted for the second
        ([(0.0, 2.0, 6.0), (1.0, 4.0, 1.0)], 8.0),
        ([(0.0, 2.0, 3.0), (1.0, 4.0, 1.0)], 7.0),
    ],
)
def test_one_machine_ends_no_sooner_than_by_hand(
    jobs: list[tuple[float, float, float]], bound: float
) -> None:
    assert one_machine_bound(jobs) == bound
