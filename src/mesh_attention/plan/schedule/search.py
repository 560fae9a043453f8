"""A better order than greedy, and how far greedy is from it (algorithm, section 5).

The makespan to minimise is that of event execution: one communication lane, one compute lane.
A beam grows schedules one task at a time. Branching follows Giffler and Thompson: take the
task that could end first and branch over the tasks that compete for its lane before it ends.
That reaches an optimal schedule without ever listing two interleavings of the same lanes.
With at most 16 compute tasks the beam often covers the whole tree and proves its result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_attention.plan.schedule.bounds import lower_bound
from mesh_attention.plan.schedule.greedy import greedy
from mesh_attention.plan.schedule.makespan import event_makespan
from mesh_attention.plan.schedule.search_state import Partial, Tables
from mesh_attention.plan.schedule.tasks import Schedule, Step, TaskGraph

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule found, in the time of event execution, beside greedy and the bound."""

    schedule: Schedule
    makespan: float
    greedy_makespan: float
    lower_bound: float

    @property
    def greedy_excess(self) -> float:
        """How much longer greedy takes: 0.1 is 10 %."""
        return self.greedy_makespan / self.makespan - 1 if self.makespan else 0.0

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
        found, pruned_bound = _beam(Tables.of(graph, index_order=index_order), makespan, beam_width)
        if found is not None:
            best = _as_schedule(graph, found)
            makespan = event_makespan(graph, best)
        if not index_order:
            bound = max(bound, min(makespan, pruned_bound))
    return SearchResult(best, makespan, greedy_makespan, min(bound, makespan))


def _beam(tables: Tables, incumbent: float, width: int) -> tuple[Partial | None, float]:
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


def _survivors(tables: Tables, children: list[Partial], width: int) -> tuple[list[Partial], float]:
    """The first `width` that no better one dominates, and the bound of the first one cut."""
    kept: list[Partial] = []
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


def _as_schedule(graph: TaskGraph, leaf: Partial) -> Schedule:
    """Steps in order of start: each communication task with the compute that starts beside it."""
    communication = {task.name for task in graph.communication}
    # The sort is stable, so tasks that take no time keep their order behind what they need.
    steps: list[Step] = []
    for name, _ in sorted(leaf.history(), key=lambda entry: entry[1]):
        if name in communication:
            steps.append(Step(name, ()))
        elif steps:
            steps[-1] = Step(steps[-1].communication, (*steps[-1].compute, name))
        else:
            steps.append(Step(None, (name,)))
    return Schedule(tuple(steps))
