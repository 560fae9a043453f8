"""Greedy is the paper's planner: the golden example to the letter, and the rules one by one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from schedule_graphs import (
    backward_graph,
    check_schedule,
    communication,
    compute,
    forward_graph,
    golden_graph,
    random_graph,
    strict_makespan,
    tasks,
)

from mesh_attention.plan.language.tasks import Schedule, TaskGraph
from mesh_attention.plan.methods.parts.greedy import greedy

GOLDEN = Path(__file__).parent / "golden" / "schedule_3x3.txt"


def test_the_golden_example_is_reproduced_to_the_letter() -> None:
    schedule = greedy(golden_graph(), gamma=1)
    assert schedule.text() == GOLDEN.read_text().rstrip("\n")
    assert schedule == Schedule.parse(GOLDEN.read_text())


def test_the_golden_example_takes_seven_units() -> None:
    assert strict_makespan(golden_graph(), greedy(golden_graph(), gamma=1)) == 7.0


def test_every_schedule_is_complete_and_in_order_for_any_costs() -> None:
    for seed in range(300):
        graph = random_graph(Random(seed))
        check_schedule(graph, greedy(graph), strict=True)


def test_the_same_graph_gives_the_same_schedule_whatever_the_order_of_its_compute_tasks() -> None:
    for seed in range(30):
        rng = Random(seed)
        graph = random_graph(rng)
        shuffled = TaskGraph(
            graph.communication, tuple(rng.sample(graph.compute, len(graph.compute)))
        )
        assert greedy(graph) == greedy(graph) == greedy(shuffled)


def test_gathers_of_a_kind_are_issued_in_index_order() -> None:
    for seed in range(100):
        graph = random_graph(Random(seed))
        order = greedy(graph).order()
        for kind in ("AG-KV", "AG-Q"):
            issued = [str(task) for task in order if task.kind == kind]
            assert issued == [f"{kind}-{i}" for i in range(len(issued))]


def test_the_gather_that_unlocks_most_compute_time_for_its_cost_goes_first() -> None:
    costs = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 9.0, (1, 1): 1.0}
    graph = forward_graph(2, 2, lambda name: 1.0, lambda q, kv: costs[q, kv])
    assert greedy(graph).order()[:3] == tasks("AG-KV-0", "AG-Q-0", "AG-Q-1")
    costs[0, 1] = 20.0
    graph = forward_graph(2, 2, lambda name: 1.0, lambda q, kv: costs[q, kv])
    assert greedy(graph).order()[:3] == tasks("AG-KV-0", "AG-Q-0", "AG-KV-1")


def test_equal_profits_go_to_the_kind_that_appears_first() -> None:
    graph = forward_graph(2, 2, lambda name: 1.0, lambda q, kv: 1.0)
    assert greedy(graph).order()[:3] == tasks("AG-KV-0", "AG-Q-0", "AG-KV-1")
    swapped = TaskGraph(
        tuple(sorted(graph.communication, key=lambda task: task.kind != "AG-Q")), graph.compute
    )
    assert greedy(swapped).order()[:3] == tasks("AG-Q-0", "AG-KV-0", "AG-Q-1")


def test_profits_that_differ_by_rounding_only_are_equal() -> None:
    # 0.1 + 0.2 exceeds 0.3 in binary; AG-Q-1 would win by a hair over AG-KV-1.
    compute = {(0, 0): 1.0, (1, 0): 0.1 + 0.2, (0, 1): 0.3, (1, 1): 1.0}
    graph = forward_graph(2, 2, lambda name: 1.0, lambda q, kv: compute[q, kv])
    assert greedy(graph).order()[2:3] == tasks("AG-KV-1")


def test_a_gather_that_costs_nothing_goes_first_once_it_unlocks_something() -> None:
    graph = forward_graph(2, 2, lambda n: 0.0 if n == "AG-Q-1" else 1.0, lambda q, kv: 1.0)
    assert greedy(graph).order()[:3] == tasks("AG-KV-0", "AG-Q-0", "AG-Q-1")


def test_a_step_is_filled_until_gamma_times_its_communication() -> None:
    graph = TaskGraph(
        (communication("AG-KV-0", 3.0),),
        tuple(compute(f"C-{q}-0", 1.0) for q in (3, 2, 1, 0)),
    )
    assert greedy(graph, gamma=1.0).text() == (
        "1 AG-KV-0 + C-0-0, C-1-0, C-2-0\n2 compute only C-3-0"
    )
    assert greedy(graph, gamma=1.05).text() == "1 AG-KV-0 + C-0-0, C-1-0, C-2-0, C-3-0"
    assert greedy(graph, gamma=0.0).steps[0].compute == ()


def test_a_reduction_that_is_ready_does_not_wait_for_one_of_lower_index() -> None:
    # Q chunk 1 sees only KV chunk 0 and is done while Q chunk 0 waits for a slow gather.
    graph = forward_graph(
        2,
        3,
        lambda name: 100.0 if name == "AG-KV-2" else 1.0,
        lambda q, kv: None if q == 1 and kv > 0 else 5.0,
    )
    order = [str(task) for task in greedy(graph).order()]
    assert order.index("RS-Q-1") < order.index("RS-Q-0")
    check_schedule(graph, greedy(graph), strict=True)


def test_causal_backward_with_missing_tasks_schedules_every_reduction_once() -> None:
    graph = backward_graph(
        4, 4, lambda name: 1.0, lambda q, kv: None if kv > q else 0.5 if kv == q else 1.0
    )
    schedule = greedy(graph)
    check_schedule(graph, schedule, strict=True)
    reductions = [str(task) for task in schedule.order() if task.kind.startswith("RS")]
    assert sorted(reductions) == sorted(
        f"{kind}-{i}" for kind in ("RS-dQ", "RS-dKV") for i in range(4)
    )


def test_compute_that_needs_no_gather_runs_at_once() -> None:
    graph = TaskGraph((), (compute("C-0-0", 1.0), compute("C-0-1", 1.0)))
    assert greedy(graph).text() == "1 compute only C-0-0\n2 compute only C-0-1"


def test_an_empty_graph_has_an_empty_schedule() -> None:
    assert greedy(TaskGraph((), ())) == Schedule(())


@pytest.mark.parametrize("gamma", [-0.1, float("nan"), float("inf")])
def test_a_gamma_that_is_negative_or_not_finite_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        greedy(golden_graph(), gamma=gamma)
