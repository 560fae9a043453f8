"""The task graph that every scheduler reads and the schedule that every scheduler writes.

A rank's work is a set of communication tasks (gathers, and reductions that need computed
results) and compute tasks (a Q chunk against a KV chunk), each with its own cost, because
under a causal mask no two chunks need cost the same (algorithm, section 5, "unequal costs").
A schedule is plain data: it prints one step a line and parses back.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

_COMPUTE_ONLY = "compute only "
# Names travel through Schedule.text(), whose separators are blanks, commas and plus signs.
_NAME = re.compile(r"[^\s,+]+")


@dataclass(frozen=True, slots=True)
class CommunicationTask:
    """One collective: "AG-KV-0" is kind "AG-KV", index 0; `needs` are compute tasks."""

    name: str
    kind: str
    index: int
    cost: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComputeTask:
    """One Q chunk against one KV chunk, "C-0-1"; `needs` are communication tasks."""

    name: str
    q_chunk: int
    kv_chunk: int
    cost: float
    needs: tuple[str, ...] = ()


Task: TypeAlias = CommunicationTask | ComputeTask


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All tasks of one rank. The kind that appears first wins ties, so AG-KV comes first."""

    communication: tuple[CommunicationTask, ...]
    compute: tuple[ComputeTask, ...]

    def __post_init__(self) -> None:
        tasks = self.tasks()
        names = Counter(task.name for task in tasks)
        for task in tasks:
            if not _NAME.fullmatch(task.name):
                raise ValueError(f"task name {task.name!r} has blanks, commas or plus signs")
            if names[task.name] > 1:
                raise ValueError(f"task {task.name} appears {names[task.name]} times")
            if not (math.isfinite(task.cost) and task.cost >= 0):
                raise ValueError(f"task {task.name} has cost {task.cost}; costs are finite, >= 0")
        _check_needs(self.communication, frozenset(task.name for task in self.compute), "compute")
        communication = frozenset(task.name for task in self.communication)
        _check_needs(self.compute, communication, "communication")
        _check_no_cycle(tasks)

    def tasks(self) -> tuple[Task, ...]:
        return (*self.communication, *self.compute)

    def kinds(self) -> tuple[str, ...]:
        """Kinds of communication in order of first appearance, which is their priority."""
        return tuple(dict.fromkeys(task.kind for task in self.communication))

    def costs(self) -> dict[str, float]:
        return {task.name: task.cost for task in self.tasks()}

    def needs(self) -> dict[str, tuple[str, ...]]:
        return {task.name: task.needs for task in self.tasks()}


@dataclass(frozen=True, slots=True)
class Step:
    """At most one communication task and the compute tasks that run beside it."""

    communication: str | None
    compute: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.communication is None and not self.compute:
            raise ValueError("a step holds a communication task, compute tasks, or both")

    def tasks(self) -> tuple[str, ...]:
        return self.compute if self.communication is None else (self.communication, *self.compute)

    def text(self) -> str:
        compute = ", ".join(self.compute)
        if self.communication is None:
            return _COMPUTE_ONLY + compute
        return f"{self.communication} + {compute}" if compute else self.communication


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in order.

    >>> print(Schedule((Step("AG-Q-1", ("C-0-0",)), Step(None, ("C-0-2",)))).text())
    1 AG-Q-1 + C-0-0
    2 compute only C-0-2
    """

    steps: tuple[Step, ...]

    def order(self) -> tuple[str, ...]:
        """Every task once: in each step the communication first, then the compute tasks."""
        return tuple(task for step in self.steps for task in step.tasks())

    def text(self) -> str:
        return "\n".join(f"{number} {step.text()}" for number, step in enumerate(self.steps, 1))

    @staticmethod
    def parse(text: str) -> Schedule:
        """The inverse of `text`; blank lines are ignored, step numbers must count from 1."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return Schedule(tuple(_parse_step(line, number) for number, line in enumerate(lines, 1)))


def check_schedule(graph: TaskGraph, schedule: Schedule, *, strict: bool) -> None:
    """Raise ValueError unless every task runs exactly once and after what it needs.

    strict: what a task needs was done when its step began (the paper's steps, as `greedy`
    makes them). Otherwise it is enough that what it needs appears earlier in `order()`,
    which is all that event execution asks for.
    """
    communication = {task.name for task in graph.communication}
    needs = graph.needs()
    counts = Counter(schedule.order())
    for name in needs:
        if counts[name] != 1:
            raise ValueError(f"task {name} is scheduled {counts[name]} times, not once")
    for name in counts:
        if name not in needs:
            raise ValueError(f"task {name} is scheduled but is not in the graph")
    done: set[str] = set()
    for number, step in enumerate(schedule.steps, 1):
        for name in step.compute:
            if name in communication:
                raise ValueError(f"step {number} lists communication task {name} as compute")
        if step.communication is not None and step.communication not in communication:
            raise ValueError(f"step {number} lists compute task {step.communication} first")
        begun = frozenset(done)
        for name in Schedule((step,)).order():
            missing = [need for need in needs[name] if need not in (begun if strict else done)]
            if missing:
                raise ValueError(f"step {number} starts {name} before {missing[0]} is done")
            done.add(name)


def _check_needs(tasks: Sequence[Task], known: frozenset[str], lane: str) -> None:
    for task in tasks:
        for need in task.needs:
            if need not in known:
                raise ValueError(f"task {task.name} needs {need}, which is no {lane} task")


def _check_no_cycle(tasks: Sequence[Task]) -> None:
    waiting = list(tasks)
    done: set[str] = set()
    while waiting:
        blocked = [task for task in waiting if not done.issuperset(task.needs)]
        if len(blocked) == len(waiting):
            raise ValueError(f"task {blocked[0].name} can never start: its needs form a cycle")
        done.update(task.name for task in waiting)
        done.difference_update(task.name for task in blocked)
        waiting = blocked


def _parse_step(line: str, number: int) -> Step:
    label, _, body = line.partition(" ")
    if label != str(number):
        raise ValueError(f"step {number} is written as {line!r}; it must begin with its number")
    head, _, tail = body.partition(" + ")
    communication: str | None = head
    if body.startswith(_COMPUTE_ONLY):
        communication, tail = None, body.removeprefix(_COMPUTE_ONLY)
    compute = tuple(tail.split(", ")) if tail else ()
    for name in (*(() if communication is None else (communication,)), *compute):
        if not _NAME.fullmatch(name):
            raise ValueError(f"step {number} has a malformed task name {name!r}")
    return Step(communication, compute)
