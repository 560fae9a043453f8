"""Greedy overlap scheduling, as the paper has it (algorithm, section 5), and under a memory cap.

Each step takes the communication task with the highest profit (compute time it newly unlocks over
its own time) and fills it with compute tasks that were ready when the step began. `greedy_capped`
only adds a veto on each action.

Reading of "lowest-index unscheduled chunk, RS only when ready": the lowest-index chunk *that is
ready*. Gathers are always ready, so for them nothing changes. Empty or unequal tasks can finish Q
chunk 1 before Q chunk 0, and waiting for RS-Q-0 would leave the stream idle for nothing (and, under
a memory cap, could hold the very buffers that RS-Q-0 waits for).

Memory: buffers live from the first operation that touches them to the last, over all tasks, so the
order of tasks decides the peak. The live set depends only on *which* tasks are done: after every
gather drain all that is ready, and the lattice of "how many gathers of each kind are issued" has
one state a point. The smallest cap is a minimax path through that lattice. This is the memory-lean
schedule that the paper leaves as future work (algorithm, section 10).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph, TaskNode
from mesh_attention.plan.problem.arguments import bytes_text

# Answers: with these tasks done, may this one be issued next?
Permission = Callable[[Set[Task], Task], bool]

# Costs are sums of measured times: equal up to rounding counts as equal, so that ties go to
# the earlier kind on every machine.
_ROUNDING = 1e-9


def greedy(
    graph: TaskGraph, *, gamma: float = 1.05, permits: Permission = lambda done, task: True
) -> Schedule:
    """The paper's schedule over the actions that `permits` allows, of which there must always be
    one; a pure function, so all ranks derive the same order."""
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma is {gamma}; it must be finite and >= 0")
    kinds = graph.kinds()
    steps: list[Step] = []
    done: set[Task] = set()
    waiting = sorted(graph.communication, key=lambda task: (kinds.index(task.kind), task.index))
    unfinished = sorted(graph.compute, key=lambda task: task.index)
    while waiting or unfinished:
        ready = [task for task in unfinished if done.issuperset(task.needs)]
        candidates = _candidates(kinds, waiting, done, permits)
        communication = _most_profitable(candidates, unfinished, done)
        if communication is not None:
            waiting.remove(communication)
            done.add(communication.task)
            target = gamma * communication.cost * (1 - _ROUNDING)
            compute = _fill(ready, target, done, permits)
        else:
            compute = next(([task] for task in ready if permits(done, task.task)), [])
            done.update(task.task for task in compute)
        assert communication is not None or compute, "no action is allowed, yet work remains"
        unfinished = [task for task in unfinished if task not in compute]
        name = None if communication is None else communication.task
        steps.append(Step(name, tuple(task.task for task in compute)))
    return Schedule(tuple(steps))


def _candidates(
    kinds: Sequence[str], waiting: Sequence[TaskNode], done: Set[Task], permits: Permission
) -> list[TaskNode]:
    """At most one task of each kind: the first in index order that is ready and permitted."""
    candidates: list[TaskNode] = []
    for kind in kinds:
        gather_seen = False
        for task in waiting:
            # Gathers keep index order: a vetoed one must not be overtaken by the next.
            overtakes = gather_seen and not task.needs
            if task.kind != kind or overtakes or not done >= set(task.needs):
                continue
            gather_seen = gather_seen or not task.needs
            if permits(done, task.task):
                candidates.append(task)
                break
    return candidates


def _most_profitable(
    candidates: Sequence[TaskNode], unfinished: Sequence[TaskNode], done: Set[Task]
) -> TaskNode | None:
    best: TaskNode | None = None
    best_profit = -1.0
    for task in candidates:
        profit = _profit(task, unfinished, done)
        if profit > best_profit * (1 + _ROUNDING):
            best, best_profit = task, profit
    return best


def _profit(task: TaskNode, unfinished: Sequence[TaskNode], done: Set[Task]) -> float:
    after = done | {task.task}
    unlocked = [c.cost for c in unfinished if task.task in c.needs and after >= set(c.needs)]
    if task.cost == 0:
        return math.inf if unlocked else 0.0
    return math.fsum(unlocked) / task.cost


def _fill(
    ready: Sequence[TaskNode], target: float, done: set[Task], permits: Permission
) -> list[TaskNode]:
    """Earliest Q chunk first, so that its reduction frees sooner; marks what it takes as done."""
    taken: list[TaskNode] = []
    filled = 0.0
    for task in ready:
        if filled >= target:
            break
        if permits(done, task.task):
            taken.append(task)
            done.add(task.task)
            filled += task.cost
    return taken


@dataclass(frozen=True)
class MemoryModel:
    """Sizes of buffers, and for each task its operations in order as the buffers they touch. Live
    bytes are a function of the set of tasks that are done."""

    buffer_bytes: Mapping[str, int]
    touches: Mapping[Task, tuple[tuple[str, ...], ...]]

    def __post_init__(self) -> None:
        for buffer, size in self.buffer_bytes.items():
            if size < 0:
                raise ValueError(f"buffer {buffer} has {size} bytes")
        for buffer, tasks in self.users.items():
            if buffer not in self.buffer_bytes:
                raise ValueError(
                    f"task {min(tasks, key=str)} touches buffer {buffer}, whose size is unknown"
                )

    @cached_property
    def users(self) -> Mapping[str, Set[Task]]:
        """The tasks that touch each buffer."""
        users: dict[str, set[Task]] = defaultdict(set)
        for task, operations in self.touches.items():
            for buffer in itertools.chain.from_iterable(operations):
                users[buffer].add(task)
        return users

    def resident_bytes(self, done: Set[Task]) -> int:
        """Bytes held between tasks: of buffers that some done and some other task touch."""
        return sum(
            self.buffer_bytes[buffer]
            for buffer, tasks in self.users.items()
            if not tasks.isdisjoint(done) and not tasks <= done
        )

    def peak_while(self, done: Set[Task], task: Task) -> int:
        """The most bytes held at any operation of `task`, run when `done` are done."""
        uses = list(enumerate(self.touches.get(task, ())))
        first = {buffer: at for at, touched in reversed(uses) for buffer in touched}
        last = {buffer: at for at, touched in uses for buffer in touched}
        changes = [self.resident_bytes(done), *[0] * (len(uses) + 1)]  # before each operation
        for buffer in last:
            size, others = self.buffer_bytes[buffer], self.users[buffer] - {task}
            changes[first[buffer] + 1] += size * others.isdisjoint(done)
            changes[last[buffer] + 2] -= size * (others <= done)
        return max(itertools.accumulate(changes))


def peak_bytes(model: MemoryModel, order: Sequence[Task]) -> int:
    """The most bytes held at any operation of a full task order."""
    missing = model.touches.keys() - set(order)
    if missing:
        raise ValueError(f"task {min(missing, key=str)} touches buffers but is not in the order")
    done: set[Task] = set()
    peak = 0
    for task in order:
        peak = max(peak, model.peak_while(done, task))
        done.add(task)
    return peak


def drain(graph: TaskGraph, model: MemoryModel, done: Set[Task]) -> tuple[int, frozenset[Task]]:
    """Run all that is ready without a gather: reductions at once, else the earliest Q chunk.
    Returns the peak bytes, and all tasks that are done then."""
    reductions = [task for task in graph.communication if task.needs and task.task not in done]
    compute = sorted(
        (task for task in graph.compute if task.task not in done), key=lambda task: task.index
    )
    reached = set(done)
    peak = model.resident_bytes(reached)
    while True:
        # Every reduction frees its accumulator, so the reduction that needs least room goes first.
        ready = min(
            (task.task for task in reductions if reached.issuperset(task.needs)),
            key=lambda name: model.peak_while(reached, name),
            default=None,
        ) or next((task.task for task in compute if reached.issuperset(task.needs)), None)
        if ready is None:
            return peak, frozenset(reached)
        peak = max(peak, model.peak_while(reached, ready))
        reached.add(ready)
        reductions = [task for task in reductions if task.task != ready]
        compute = [task for task in compute if task.task != ready]


# How many gathers of each kind are issued. After draining, what is done (and so what is live)
# depends only on the point, not on the path to it.
Point = tuple[int, ...]


class Lattice:
    """The minimax paths through the points. An edge issues one more gather and drains; it weighs
    the peak meanwhile. `bytes_to_go[point]` is the least, over all paths to the end, of the
    heaviest edge."""

    def __init__(self, graph: TaskGraph, model: MemoryModel) -> None:
        all_gathers = [task for task in graph.communication if not task.needs]
        by_kind = [
            sorted((task for task in all_gathers if task.kind == kind), key=lambda task: task.index)
            for kind in dict.fromkeys(task.kind for task in all_gathers)
        ]
        self._gathers = by_kind
        end = tuple(len(tasks) for tasks in by_kind)
        self.bytes_to_go: dict[Point, int] = {end: 0}
        # Backwards, so that every point one gather further on is known already.
        points = list(itertools.product(*(range(count + 1) for count in end)))
        for point in reversed(points[:-1]):
            counted = zip(by_kind, point, strict=True)
            issued = {task.task for tasks, count in counted for task in tasks[:count]}
            _, here = drain(graph, model, issued)
            weights: list[int] = []
            for axis, tasks in enumerate(by_kind):
                if point[axis] == len(tasks):
                    continue
                gather = tasks[point[axis]].task
                further = (*point[:axis], point[axis] + 1, *point[axis + 1 :])
                drained, _ = drain(graph, model, here | {gather})
                peak = max(model.peak_while(here, gather), drained)
                weights.append(max(peak, self.bytes_to_go[further]))
            self.bytes_to_go[point] = min(weights)
        # Compute that needs no gather (a group of one rank) is drained before the first edge.
        before_first, _ = drain(graph, model, frozenset())
        self.smallest_cap_bytes = max(before_first, self.bytes_to_go[points[0]])

    def point(self, done: Set[Task]) -> Point:
        return tuple(sum(task.task in done for task in tasks) for tasks in self._gathers)


def smallest_cap(graph: TaskGraph, model: MemoryModel) -> int:
    """The smallest peak over all orders that gather in index order and drain eagerly."""
    return Lattice(graph, model).smallest_cap_bytes


class MemoryCapError(PlanError):
    """No schedule fits under the cap; `smallest_cap_bytes` is the smallest that does."""

    def __init__(self, cap_bytes: int, smallest_cap_bytes: int) -> None:
        super().__init__(
            f"max_memory_bytes={cap_bytes}: no schedule fits into {bytes_text(cap_bytes)}; the "
            f"smallest cap that fits is {smallest_cap_bytes} bytes "
            f"({bytes_text(smallest_cap_bytes)})"
        )
        self.cap_bytes = cap_bytes
        self.smallest_cap_bytes = smallest_cap_bytes


def greedy_capped(
    graph: TaskGraph, model: MemoryModel, cap_bytes: int, *, gamma: float = 1.05
) -> Schedule:
    """`greedy` whose `order()` holds at most `cap_bytes`, as `peak_bytes` counts them.

    An action is allowed only if, after it, draining eagerly stays within the cap and from the point
    then reached some path to the end stays within it too. So there is always a way on, and with
    room to spare the schedule is `greedy`'s own.
    """
    lattice = Lattice(graph, model)
    if cap_bytes < lattice.smallest_cap_bytes:
        raise MemoryCapError(cap_bytes, lattice.smallest_cap_bytes)

    def permits(done: Set[Task], name: Task) -> bool:
        after = done | {name}
        return (
            model.peak_while(done, name) <= cap_bytes
            and lattice.bytes_to_go[lattice.point(after)] <= cap_bytes
            and drain(graph, model, after)[0] <= cap_bytes
        )

    return greedy(graph, gamma=gamma, permits=permits)
