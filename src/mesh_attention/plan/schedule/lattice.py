"""The minimax path through the lattice of issued gathers: the least memory an order can use.

A point says how many gathers of each kind are issued. After draining, what is done (and so
what is live) depends only on the point, not on the path to it. An edge issues one more gather
and drains; it weighs the peak meanwhile. `bytes_to_go[point]` is the least, over all paths to
the end, of the heaviest edge.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from dataclasses import dataclass

from mesh_attention.plan.schedule.memory import MemoryModel, Residency, drain, gathers
from mesh_attention.plan.schedule.tasks import CommunicationTask, TaskGraph

# How many gathers of each kind are issued.
Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lattice:
    gathers: tuple[tuple[CommunicationTask, ...], ...]
    bytes_to_go: Mapping[Point, int]
    smallest_cap_bytes: int

    def point(self, done: Set[str]) -> Point:
        return tuple(sum(task.name in done for task in tasks) for tasks in self.gathers)


def build_lattice(graph: TaskGraph, residency: Residency) -> Lattice:
    by_kind = gathers(graph)
    end = tuple(len(tasks) for tasks in by_kind)
    bytes_to_go: dict[Point, int] = {end: 0}
    # Backwards, so that every point one gather further on is known already.
    points = list(itertools.product(*(range(count + 1) for count in end)))
    for point in reversed(points[:-1]):
        issued = {
            task.name for tasks, count in zip(by_kind, point, strict=True) for task in tasks[:count]
        }
        here = drain(graph, residency, issued).done
        weights: list[int] = []
        for axis, tasks in enumerate(by_kind):
            if point[axis] == len(tasks):
                continue
            gather = tasks[point[axis]].name
            further = (*point[:axis], point[axis] + 1, *point[axis + 1 :])
            peak = residency.peak_while(here, gather)
            peak = max(peak, drain(graph, residency, here | {gather}).peak_bytes)
            weights.append(max(peak, bytes_to_go[further]))
        bytes_to_go[point] = min(weights)
    # Compute that needs no gather (a group of one rank) is drained before the first edge.
    before_first = drain(graph, residency, frozenset()).peak_bytes
    return Lattice(by_kind, bytes_to_go, max(before_first, bytes_to_go[points[0]]))


def smallest_cap(graph: TaskGraph, model: MemoryModel) -> int:
    """The smallest peak over all orders that gather in index order and drain eagerly."""
    return build_lattice(graph, Residency.of(model)).smallest_cap_bytes
