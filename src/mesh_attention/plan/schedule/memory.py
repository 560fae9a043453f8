"""How many bytes a task order holds at once, and the least that any order can do with.

Buffers live from the first operation that touches them to the last, over all tasks, so the
order of tasks decides the peak. The live set depends only on *which* tasks are done: after
every gather drain all that is ready, and the lattice of "how many gathers of each kind are
issued" has one state a point. The smallest cap is a minimax path through that lattice. This is
the memory-lean schedule that the paper leaves as future work (algorithm, section 10).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from mesh_attention.plan.schedule.tasks import CommunicationTask, TaskGraph


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Sizes of buffers, and for each task its operations in order as the buffers they touch."""

    buffer_bytes: Mapping[str, int]
    touches: Mapping[str, tuple[tuple[str, ...], ...]]

    def __post_init__(self) -> None:
        for buffer, size in self.buffer_bytes.items():
            if size < 0:
                raise ValueError(f"buffer {buffer} has {size} bytes")
        for task, operations in self.touches.items():
            for buffer in itertools.chain.from_iterable(operations):
                if buffer not in self.buffer_bytes:
                    raise ValueError(f"task {task} touches buffer {buffer}, whose size is unknown")

    def users(self) -> dict[str, frozenset[str]]:
        """For each buffer the tasks that touch it."""
        found: dict[str, set[str]] = {}
        for task, operations in self.touches.items():
            for buffer in itertools.chain.from_iterable(operations):
                found.setdefault(buffer, set()).add(task)
        return {buffer: frozenset(tasks) for buffer, tasks in found.items()}


@dataclass(frozen=True, slots=True)
class Residency:
    """Live bytes as a function of the set of tasks that are done."""

    model: MemoryModel
    users: Mapping[str, frozenset[str]]

    @staticmethod
    def of(model: MemoryModel) -> Residency:
        return Residency(model, model.users())

    def resident_bytes(self, done: Set[str]) -> int:
        """Held between tasks: touched by a task that is done, and by one that is not."""
        return sum(
            self.model.buffer_bytes[buffer]
            for buffer, tasks in self.users.items()
            if not tasks.isdisjoint(done) and not tasks <= done
        )

    def peak_while(self, done: Set[str], task: str) -> int:
        """The most bytes held at any operation of `task`, run when `done` are done."""
        operations = self.model.touches.get(task, ())
        live = self.resident_bytes(done)
        last_use = {buffer: i for i, touched in enumerate(operations) for buffer in touched}
        seen: set[str] = set()
        peak = live
        for i, touched in enumerate(operations):
            fresh = set(touched) - seen
            seen |= fresh
            live += sum(
                self.model.buffer_bytes[buffer]
                for buffer in fresh
                if self.users[buffer].isdisjoint(done)
            )
            peak = max(peak, live)
            live -= sum(
                self.model.buffer_bytes[buffer]
                for buffer in set(touched)
                if last_use[buffer] == i and self.users[buffer] - {task} <= done
            )
        return peak


def peak_bytes(model: MemoryModel, order: Sequence[str]) -> int:
    """The most bytes held at any operation of a full task order."""
    missing = model.touches.keys() - set(order)
    if missing:
        raise ValueError(f"task {min(missing)} touches buffers but is not in the order")
    residency = Residency.of(model)
    done: set[str] = set()
    peak = 0
    for task in order:
        peak = max(peak, residency.peak_while(done, task))
        done.add(task)
    return peak


@dataclass(frozen=True, slots=True)
class Drain:
    """What eager draining from a set of done tasks leads to: its peak, and all tasks done."""

    peak_bytes: int
    done: frozenset[str]


def drain(graph: TaskGraph, residency: Residency, done: Set[str]) -> Drain:
    """Run all that is ready without a gather: reductions at once, else the earliest Q chunk."""
    reductions = [task for task in graph.communication if task.needs and task.name not in done]
    compute = sorted(
        (task for task in graph.compute if task.name not in done),
        key=lambda task: (task.q_chunk, task.kv_chunk),
    )
    reached = set(done)
    peak = residency.resident_bytes(reached)
    while True:
        # Every reduction frees its accumulator, so the one that needs least room goes first.
        ready = min(
            (task.name for task in reductions if reached.issuperset(task.needs)),
            key=lambda name: residency.peak_while(reached, name),
            default=None,
        ) or next((task.name for task in compute if reached.issuperset(task.needs)), None)
        if ready is None:
            return Drain(peak, frozenset(reached))
        peak = max(peak, residency.peak_while(reached, ready))
        reached.add(ready)
        reductions = [task for task in reductions if task.name != ready]
        compute = [task for task in compute if task.name != ready]


def gathers(graph: TaskGraph) -> tuple[tuple[CommunicationTask, ...], ...]:
    """Communication tasks with no needs, one tuple a kind, in index order."""
    found = (
        tuple(
            sorted(
                (task for task in graph.communication if task.kind == kind and not task.needs),
                key=lambda task: task.index,
            )
        )
        for kind in graph.kinds()
    )
    return tuple(tasks for tasks in found if tasks)
