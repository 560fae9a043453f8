"""A better order of tasks than greedy's, and how far any order can go (algorithm, section 5).

Methods use `search` for scheduler="search"; `read/compare.py` compares with it.

Schedules are timed by events: one communication stream, one compute stream, and a task starts as
soon as its stream is free and its needs are done. That is never slower than the paper's steps,
whose two halves end together.

A beam grows schedules one task at a time. Branching follows Giffler and Thompson: take the task
that could end first and branch over the tasks that compete for its stream before it ends. That
reaches an optimal schedule without listing two interleavings of the same streams. With at most 16
compute tasks the beam often covers the whole tree and proves its result. Tasks are numbered and
sets of tasks are bit masks, because a search looks at tens of thousands of partial schedules.

`lower_bound` relaxes one stream at a time to the one-machine problem with heads (earliest start)
and tails (work that must follow). Its preemptive optimum, which Jackson's rule gives exactly, is a
time below which no order can finish. `search` prunes with it and can call a result optimal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph, check_schedule
from mesh_attention.plan.schedule.greedy import greedy

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule found, in the time of event execution, beside greedy and the bound."""

    schedule: Schedule
    makespan: float
    greedy_makespan: float
    lower_bound: float

    @property
    def proven_optimal(self) -> bool:
        return math.isclose(self.makespan, self.lower_bound, rel_tol=_ROUNDING)


def search(graph: TaskGraph, *, beam_width: int = 64) -> SearchResult:
    """Never worse than greedy: greedy's order is the first incumbent."""
    if beam_width < 1:
        raise ValueError(f"beam_width is {beam_width}; it must be at least 1")
    best = greedy(graph)
    greedy_makespan = makespan = event_makespan(graph, best)
    bound = lower_bound(graph)
    # Chunks of equal cost are interchangeable, and a beam full of their permutations sees
    # little else; index order first finds a good incumbent, then any order may beat it.
    for index_order in (True, False):
        if makespan <= bound * (1 + _ROUNDING):
            break
        leaf, pruned_bound = _beam(Tables(graph, index_order=index_order), makespan, beam_width)
        if leaf is not None:
            best = _as_schedule(graph, leaf)
            makespan = event_makespan(graph, best)
        if not index_order:
            bound = max(bound, min(makespan, pruned_bound))
    return SearchResult(best, makespan, greedy_makespan, min(bound, makespan))


def _beam(tables: Tables, incumbent: float, width: int) -> tuple[PartialSchedule | None, float]:
    """The best full schedule under `incumbent`, and a bound on all that the beam cut away."""
    level = [tables.root()]
    pruned_bound = math.inf
    for _ in range(tables.num_tasks):
        children = [
            child
            for parent in level
            for child in tables.children(parent)
            if child.bound < incumbent * (1 - _ROUNDING)
        ]
        children.sort(key=lambda child: (child.bound, child.idle))
        level, first_cut = _survivors(tables, children, width)
        pruned_bound = min(pruned_bound, first_cut)
    return (level[0] if level else None), pruned_bound


def _survivors(
    tables: Tables, children: list[PartialSchedule], width: int
) -> tuple[list[PartialSchedule], float]:
    """The first `width` that no better one dominates, and the bound of the first one cut."""
    kept: list[PartialSchedule] = []
    fronts: dict[int, list[tuple[float, ...]]] = {}
    for child in children:
        front = fronts.setdefault(child.issued, [])
        earliest = tables.earliest_starts(child)
        if any(all(map(float.__le__, other, earliest)) for other in front):
            continue
        if len(kept) == width:
            return kept, child.bound
        front.append(earliest)
        kept.append(child)
    return kept, math.inf


def _as_schedule(graph: TaskGraph, leaf: PartialSchedule) -> Schedule:
    """Steps in order of start: each communication task with the compute that starts beside it."""
    communication = {task.task for task in graph.communication}
    # The sort is stable, so tasks that take no time keep their order behind what they need.
    steps: list[Step] = []
    for name, _ in sorted(leaf.history, key=lambda entry: entry[1]):
        if name in communication:
            steps.append(Step(name, ()))
        elif steps:
            steps[-1] = Step(steps[-1].communication, (*steps[-1].compute, name))
        else:
            steps.append(Step(None, (name,)))
    return Schedule(tuple(steps))


_COMMUNICATION, _COMPUTE = 0, 1


@dataclass(frozen=True, slots=True)
class PartialSchedule:
    """Some tasks placed on the streams."""

    issued: int
    stream_free: tuple[float, float]
    release: tuple[float, ...]  # of each task: when the last of its issued needs ends
    bound: float
    idle: float
    history: tuple[tuple[Task, float], ...]  # tasks and starts in the order of placing


class Tables:
    """The graph by number: communication tasks first, then compute tasks."""

    def __init__(self, graph: TaskGraph, *, index_order: bool) -> None:
        """index_order: gathers of a kind may only be issued in the order of their index."""
        tasks = graph.tasks()
        self.num_tasks = len(tasks)
        self.tasks = [task.task for task in tasks]
        self.costs = [float(task.cost) for task in tasks]
        self.streams = [_COMMUNICATION] * len(graph.communication) + [_COMPUTE] * len(graph.compute)
        number = {task: i for i, task in enumerate(self.tasks)}
        self.needs = [[number[need] for need in task.needs] for task in tasks]
        self.followers = [
            [i for i, its_needs in enumerate(self.needs) if need in its_needs]
            for need in range(len(tasks))
        ]
        tail = tails(graph)
        self.tails = [tail[task] for task in self.tasks]
        # Bit masks: the needs of each task, and earlier gathers in index order.
        self.waits_for = [sum(1 << need for need in set(its_needs)) for its_needs in self.needs]
        gathers = [task for task in graph.communication if not task.needs]
        for task in gathers if index_order else ():
            self.waits_for[number[task.task]] = sum(
                1 << number[other.task]
                for other in gathers
                if other.kind == task.kind and other.index < task.index
            )

    def root(self) -> PartialSchedule:
        return PartialSchedule(0, (0.0, 0.0), (0.0,) * self.num_tasks, 0.0, 0.0, ())

    def children(self, partial: PartialSchedule) -> Iterator[PartialSchedule]:
        """Giffler-Thompson: every way to decide the next contested stretch of one stream."""
        startable = [
            (max(partial.stream_free[self.streams[task]], partial.release[task]), task)
            for task in self._unissued(partial.issued)
            if not self.waits_for[task] & ~partial.issued
        ]
        first_end, first = min((start + self.costs[task], task) for start, task in startable)
        for start, task in startable:
            competes = self.streams[task] == self.streams[first] and start < first_end
            if task == first or competes:
                yield self._place(partial, task, start)

    def earliest_starts(self, partial: PartialSchedule) -> tuple[float, ...]:
        """All that the future depends on: no larger anywhere means no worse."""
        free = partial.stream_free
        return free + tuple(
            max(partial.release[task], free[self.streams[task]])
            for task in self._unissued(partial.issued)
        )

    def _place(self, partial: PartialSchedule, task: int, start: float) -> PartialSchedule:
        end = start + self.costs[task]
        communication_free, compute_free = partial.stream_free
        communicates = self.streams[task] == _COMMUNICATION
        stream_free = (end, compute_free) if communicates else (communication_free, end)
        release = list(partial.release)
        for follower in self.followers[task]:
            release[follower] = max(release[follower], end)
        issued = partial.issued | 1 << task
        return PartialSchedule(
            issued=issued,
            stream_free=stream_free,
            release=tuple(release),
            # A bound never falls along a branch; rounding must not make it seem to.
            bound=max(partial.bound, self._bound(issued, stream_free, release)),
            idle=partial.idle + (start - partial.stream_free[self.streams[task]]),
            history=(*partial.history, (self.tasks[task], start)),
        )

    def _bound(self, issued: int, stream_free: tuple[float, float], release: list[float]) -> float:
        jobs: tuple[list[tuple[float, float, float]], ...] = ([], [])
        for task in self._unissued(issued):
            stream = self.streams[task]
            head = max(stream_free[stream], release[task])
            if self.waits_for[task] & ~issued:
                # The needs that are missing run one after the other on the other stream.
                missing = [self.costs[n] for n in self.needs[task] if not issued >> n & 1]
                if missing:
                    head = max(head, stream_free[1 - stream] + sum(missing))
            jobs[stream].append((head, self.costs[task], self.tails[task]))
        return max(*stream_free, one_machine_bound(jobs[0]), one_machine_bound(jobs[1]))

    def _unissued(self, issued: int) -> list[int]:
        return [task for task in range(self.num_tasks) if not issued >> task & 1]


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
    tail: dict[Task, float] = {}
    for name in reversed(graph.in_order()):
        # All followers of a task share the other stream, so they run one after the other.
        tail[name] = one_machine_bound((0.0, costs[n], tail[n]) for n in followers[name])
    return tail


def heads(graph: TaskGraph) -> dict[Task, float]:
    """For every task, a lower bound on its start."""
    costs, needs = graph.costs(), graph.needs()
    head: dict[Task, float] = {}
    for name in graph.in_order():
        head[name] = one_machine_bound((head[n], costs[n], 0.0) for n in needs[name])
    return head


def lower_bound(graph: TaskGraph) -> float:
    """No schedule of this graph, strict or by events, ends earlier."""
    head, tail = heads(graph), tails(graph)
    return max(
        one_machine_bound((head[task.task], task.cost, tail[task.task]) for task in stream)
        for stream in (graph.communication, graph.compute)
    )
