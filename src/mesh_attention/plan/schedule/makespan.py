"""How long a schedule takes by events: two streams in its order, one of communication and one of
computation, where a task starts as soon as its stream is free and its own needs are done. That is
never slower than the paper's steps, whose two halves end together (algorithm, section 5).

And a time below which no order can finish: relax one stream at a time to the classic one-machine
problem with heads (earliest start) and tails (work that must follow); its preemptive optimum, which
Jackson's rule gives exactly, is a lower bound. `search` prunes with it, and it lets a result be
called optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, TaskGraph, check_schedule


def event_times(graph: TaskGraph, schedule: Schedule) -> dict[Task, tuple[float, float]]:
    """Start and end of every task, in `order()` order."""
    check_schedule(graph, schedule, strict=False)
    costs, needs = graph.costs(), graph.needs()
    communication = {task.task for task in graph.communication}
    times: dict[Task, tuple[float, float]] = {}
    stream_free = {True: 0.0, False: 0.0}
    for name in schedule.order():
        stream = name in communication
        start = max([stream_free[stream], *(times[need][1] for need in needs[name])])
        stream_free[stream] = start + costs[name]
        times[name] = (start, stream_free[stream])
    return times


def event_makespan(graph: TaskGraph, schedule: Schedule) -> float:
    """When the last task ends."""
    return max((end for _, end in event_times(graph, schedule).values()), default=0.0)


# One job on one machine: head, cost, tail.
Job = tuple[float, float, float]


def one_machine_bound(jobs: Iterable[Job]) -> float:
    """Preemptive one-machine makespan: always run the released job with the longest tail.

    >>> one_machine_bound([(0.0, 2.0, 0.0), (1.0, 1.0, 5.0)])
    7.0
    """
    bound = now = 0.0
    released: list[list[float]] = []  # [-tail, work left], longest tail first
    for head, cost, tail in sorted(jobs):
        while released and now < head:
            work = min(released[0][1], head - now)
            now += work
            released[0][1] -= work
            if released[0][1] <= 0.0:
                bound = max(bound, now - heapq.heappop(released)[0])
        now = max(now, head)
        heapq.heappush(released, [-tail, cost])
    while released:
        minus_tail, work = heapq.heappop(released)
        now += work
        bound = max(bound, now - minus_tail)
    return bound


def tails(graph: TaskGraph) -> dict[Task, float]:
    """For every task, a lower bound on the time from its end to the end of the schedule."""
    costs, needs = graph.costs(), graph.needs()
    followers: dict[Task, list[Task]] = {name: [] for name in costs}
    for name, its_needs in needs.items():
        for need in its_needs:
            followers[need].append(name)
    found: dict[Task, float] = {}
    for name in reversed(_topological(needs)):
        # All followers of a task share the other stream, so they run one after the other.
        found[name] = one_machine_bound((0.0, costs[n], found[n]) for n in followers[name])
    return found


def heads(graph: TaskGraph) -> dict[Task, float]:
    """For every task, a lower bound on its start."""
    costs, needs = graph.costs(), graph.needs()
    found: dict[Task, float] = {}
    for name in _topological(needs):
        found[name] = one_machine_bound((found[n], costs[n], 0.0) for n in needs[name])
    return found


def lower_bound(graph: TaskGraph) -> float:
    """No schedule of this graph, strict or by events, ends earlier."""
    head, tail = heads(graph), tails(graph)
    return max(
        one_machine_bound((head[task.task], task.cost, tail[task.task]) for task in stream)
        for stream in (graph.communication, graph.compute)
    )


def _topological(needs: dict[Task, tuple[Task, ...]]) -> list[Task]:
    order: dict[Task, None] = {}
    while len(order) < len(needs):
        for name, its_needs in needs.items():
            if name not in order and all(need in order for need in its_needs):
                order[name] = None
    return list(order)
