"""How long a schedule takes, under the paper's steps and under events.

Steps: both halves of a step finish before the next begins. Events: the same order on one
communication lane and one compute lane, but a task starts as soon as its lane is free and its
own needs are done, so it can only be faster (algorithm, section 5, "event order").
"""

from __future__ import annotations

from mesh_attention.plan.schedule.tasks import Schedule, TaskGraph, check_schedule


def strict_makespan(graph: TaskGraph, schedule: Schedule) -> float:
    """Sum over steps of the longer of the communication and the compute in it."""
    check_schedule(graph, schedule, strict=True)
    costs = graph.costs()
    total = 0.0
    for step in schedule.steps:
        communication = 0.0 if step.communication is None else costs[step.communication]
        total += max(communication, sum(costs[name] for name in step.compute))
    return total


def event_times(graph: TaskGraph, schedule: Schedule) -> dict[str, tuple[float, float]]:
    """Start and end of every task, in `order()` order."""
    check_schedule(graph, schedule, strict=False)
    costs, needs = graph.costs(), graph.needs()
    communication = {task.name for task in graph.communication}
    times: dict[str, tuple[float, float]] = {}
    lane_free = {True: 0.0, False: 0.0}
    for name in schedule.order():
        lane = name in communication
        start = max([lane_free[lane], *(times[need][1] for need in needs[name])])
        lane_free[lane] = start + costs[name]
        times[name] = (start, lane_free[lane])
    return times


def event_makespan(graph: TaskGraph, schedule: Schedule) -> float:
    """When the last task ends."""
    return max((end for _, end in event_times(graph, schedule).values()), default=0.0)
