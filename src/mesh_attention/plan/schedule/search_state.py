"""Partial schedules of the two-lane problem, and the tables that grow them.

Kept apart from `search` so that the beam reads as a beam. Tasks are numbered and sets of tasks
are bit masks, because a search looks at tens of thousands of partial schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh_attention.plan.schedule.bounds import one_machine_bound, tails
from mesh_attention.plan.schedule.tasks import TaskGraph

_COMMUNICATION, _COMPUTE = 0, 1


@dataclass(frozen=True, slots=True)
class Partial:
    """Some tasks placed on the lanes; `parent` and `placed` (name, start) tell the story."""

    issued: int
    lane_free: tuple[float, float]
    release: tuple[float, ...]  # of each task: when the last of its issued needs ends
    bound: float
    idle: float
    parent: Partial | None
    placed: tuple[str, float]

    def history(self) -> list[tuple[str, float]]:
        """(name, start) of every task in the order of placing, in which needs come first."""
        entries: list[tuple[str, float]] = []
        partial = self
        while partial.parent is not None:
            entries.append(partial.placed)
            partial = partial.parent
        return entries[::-1]


@dataclass(frozen=True, slots=True)
class Tables:
    """The graph by number: communication tasks first, then compute tasks."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    lanes: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    waits_for: tuple[int, ...]  # bit masks: its needs, and earlier gathers in index order
    followers: tuple[tuple[int, ...], ...]
    tails: tuple[float, ...]

    @staticmethod
    def of(graph: TaskGraph, *, index_order: bool) -> Tables:
        """index_order: gathers of a kind may only be issued in the order of their index."""
        tasks = graph.tasks()
        number = {task.name: i for i, task in enumerate(tasks)}
        needs = tuple(tuple(number[need] for need in task.needs) for task in tasks)
        waits_for = [sum(1 << need for need in set(its_needs)) for its_needs in needs]
        gathers = [task for task in graph.communication if not task.needs]
        for task in gathers if index_order else ():
            waits_for[number[task.name]] = sum(
                1 << number[other.name]
                for other in gathers
                if other.kind == task.kind and other.index < task.index
            )
        tail = tails(graph)
        return Tables(
            names=tuple(task.name for task in tasks),
            costs=tuple(float(task.cost) for task in tasks),
            lanes=tuple(
                _COMMUNICATION if i < len(graph.communication) else _COMPUTE
                for i in range(len(tasks))
            ),
            needs=needs,
            waits_for=tuple(waits_for),
            followers=tuple(
                tuple(i for i, its_needs in enumerate(needs) if need in its_needs)
                for need in range(len(tasks))
            ),
            tails=tuple(tail[task.name] for task in tasks),
        )

    @property
    def num_tasks(self) -> int:
        return len(self.names)

    def root(self) -> Partial:
        return Partial(0, (0.0, 0.0), (0.0,) * self.num_tasks, 0.0, 0.0, None, ("", 0.0))

    def children(self, partial: Partial) -> Iterator[Partial]:
        """Giffler-Thompson: every way to decide the next contested stretch of one lane."""
        startable = [
            (max(partial.lane_free[self.lanes[task]], partial.release[task]), task)
            for task in self._unissued(partial.issued)
            if not self.waits_for[task] & ~partial.issued
        ]
        first_end, first = min((start + self.costs[task], task) for start, task in startable)
        for start, task in startable:
            competes = self.lanes[task] == self.lanes[first] and start < first_end
            if task == first or competes:
                yield self._place(partial, task, start)

    def earliest_starts(self, partial: Partial) -> tuple[float, ...]:
        """All that the future depends on: no larger anywhere means no worse."""
        free = partial.lane_free
        return free + tuple(
            max(partial.release[task], free[self.lanes[task]])
            for task in self._unissued(partial.issued)
        )

    def _place(self, partial: Partial, task: int, start: float) -> Partial:
        end = start + self.costs[task]
        communication_free, compute_free = partial.lane_free
        if self.lanes[task] == _COMMUNICATION:
            idle, lane_free = start - communication_free, (end, compute_free)
        else:
            idle, lane_free = start - compute_free, (communication_free, end)
        release = list(partial.release)
        for follower in self.followers[task]:
            release[follower] = max(release[follower], end)
        issued = partial.issued | 1 << task
        return Partial(
            issued=issued,
            lane_free=lane_free,
            release=tuple(release),
            # A bound never falls along a branch; rounding must not make it seem to.
            bound=max(partial.bound, self._bound(issued, lane_free, release)),
            idle=partial.idle + idle,
            parent=partial,
            placed=(self.names[task], start),
        )

    def _bound(self, issued: int, lane_free: tuple[float, float], release: list[float]) -> float:
        jobs: tuple[list[tuple[float, float, float]], ...] = ([], [])
        for task in self._unissued(issued):
            lane = self.lanes[task]
            head = max(lane_free[lane], release[task])
            if self.waits_for[task] & ~issued:
                # The needs that are missing run one after the other on the other lane.
                missing = [self.costs[n] for n in self.needs[task] if not issued >> n & 1]
                if missing:
                    head = max(head, lane_free[1 - lane] + sum(missing))
            jobs[lane].append((head, self.costs[task], self.tails[task]))
        return max(*lane_free, one_machine_bound(jobs[0]), one_machine_bound(jobs[1]))

    def _unissued(self, issued: int) -> list[int]:
        return [task for task in range(self.num_tasks) if not issued >> task & 1]
