"""The task graph refuses what no scheduler could run; schedules print, parse and are checked."""

from __future__ import annotations

from random import Random

import pytest
from schedule_graphs import (
    check_schedule,
    communication,
    compute,
    golden_graph,
    random_graph,
    tasks,
)

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph
from mesh_attention.plan.methods.parts.greedy import greedy


def test_a_name_that_text_could_not_carry_is_refused() -> None:
    with pytest.raises(ValueError, match="'C 0, 0' is not a task such as AG-Q-0"):
        Task.parse("C 0, 0")


def test_a_step_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a step holds"):
        Step(None, ())


def test_text_names_the_parts_of_each_kind_of_step() -> None:
    schedule = Schedule(
        (
            Step(Task("AG-KV", (0,)), ()),
            Step(Task("AG-KV", (2,)), tasks("C-1-1", "C-2-0")),
            Step(None, tasks("C-0-2")),
        )
    )
    assert schedule.text() == "1 AG-KV-0\n2 AG-KV-2 + C-1-1, C-2-0\n3 compute only C-0-2"
    assert schedule.order() == tasks("AG-KV-0", "AG-KV-2", "C-1-1", "C-2-0", "C-0-2")


def test_any_schedule_parses_back_from_its_text() -> None:
    for seed in range(50):
        schedule = greedy(random_graph(Random(seed)))
        assert Schedule.parse(schedule.text()) == schedule


@pytest.mark.parametrize("text", ["AG-Q-0", "2 AG-Q-0", "1 ", "1 AG-Q-0 C-0-0", "1 A + B,C"])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="step 1"):
        Schedule.parse(text)


def test_a_missing_a_repeated_and_an_unknown_task_are_found() -> None:
    graph = golden_graph()
    steps = greedy(graph).steps
    with pytest.raises(ValueError, match="RS-Q-2 is scheduled 0 times"):
        check_schedule(graph, Schedule(steps[:-1]), strict=True)
    with pytest.raises(ValueError, match="RS-Q-2 is scheduled 2 times"):
        check_schedule(graph, Schedule((*steps, steps[-1])), strict=True)
    with pytest.raises(ValueError, match="C-9-9 is scheduled but"):
        check_schedule(graph, Schedule((*steps, Step(None, tasks("C-9-9")))), strict=True)


def test_a_task_in_the_wrong_half_of_a_step_is_found() -> None:
    graph = TaskGraph((communication("AG-Q-0", 1.0),), ())
    with pytest.raises(ValueError, match="AG-Q-0 as compute"):
        check_schedule(graph, Schedule((Step(None, tasks("AG-Q-0")),)), strict=False)


def test_compute_beside_its_own_gather_is_fine_by_events_but_not_by_steps() -> None:
    graph = TaskGraph(
        (communication("AG-Q-0", 1.0),),
        (compute("C-0-0", 1.0, "AG-Q-0"),),
    )
    schedule = Schedule((Step(Task("AG-Q", (0,)), tasks("C-0-0")),))
    check_schedule(graph, schedule, strict=False)
    with pytest.raises(ValueError, match="starts C-0-0 before AG-Q-0"):
        check_schedule(graph, schedule, strict=True)


def test_a_task_before_its_need_is_found_by_events_too() -> None:
    graph = TaskGraph(
        (communication("AG-Q-0", 1.0),),
        (compute("C-0-0", 1.0, "AG-Q-0"),),
    )
    schedule = Schedule((Step(None, tasks("C-0-0")), Step(Task("AG-Q", (0,)), ())))
    with pytest.raises(ValueError, match="starts C-0-0 before AG-Q-0"):
        check_schedule(graph, schedule, strict=False)
