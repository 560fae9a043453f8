"""The task graph that every scheduler reads, the schedule that it writes, and schedules of slices.

Methods make the graph, `plan/methods/parts/greedy.py` orders it, and plans carry the schedule. A
rank's work is a set of communication tasks (gathers, and reductions that need computed results) and
compute tasks (a Q chunk against a KV chunk). Each has its own cost: under a causal mask no two
chunks need cost the same (algorithm, section 5, "unequal costs"). A schedule prints one step a line
and parses back. Slices of the heads need the same tasks, so their schedules follow each other
(`plan/methods/parts/chunks.py` says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_attention.plan.language.program import Task

_COMPUTE_ONLY = "compute only "


@dataclass(frozen=True, slots=True)
class TaskNode:
    """A task with its cost and the tasks that it needs. A collective, such as RS-Q-0, needs
    computations; a Q chunk against a KV chunk, such as C-0-1, needs collectives."""

    task: Task
    cost: float
    needs: tuple[Task, ...] = ()

    @property
    def kind(self) -> str:
        return self.task.kind

    @property
    def index(self) -> tuple[int, ...]:
        return self.task.index


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All tasks of one rank. The kind that appears first wins ties, so AG-KV comes first."""

    communication: tuple[TaskNode, ...]
    compute: tuple[TaskNode, ...]

    def kinds(self) -> tuple[str, ...]:
        """Kinds of communication in order of first appearance, which is their priority."""
        return tuple(dict.fromkeys(task.kind for task in self.communication))

    def needs(self) -> dict[Task, tuple[Task, ...]]:
        """What each task needs."""
        return {node.task: node.needs for node in (*self.communication, *self.compute)}


@dataclass(frozen=True, slots=True)
class Step:
    """At most one communication task and the compute tasks that run beside it."""

    communication: Task | None
    compute: tuple[Task, ...]

    def __post_init__(self) -> None:
        if self.communication is None and not self.compute:
            raise ValueError("a step holds a communication task, compute tasks, or both")

    def tasks(self) -> tuple[Task, ...]:
        return self.compute if self.communication is None else (self.communication, *self.compute)

    def text(self) -> str:
        compute = ", ".join(map(str, self.compute))
        if self.communication is None:
            return _COMPUTE_ONLY + compute
        return f"{self.communication} + {compute}" if compute else str(self.communication)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in order.

    >>> Schedule.parse("1 AG-Q-1 + C-0-0").steps[0].communication
    Task(kind='AG-Q', index=(1,), stage='')
    >>> print(Schedule.parse("1 AG-Q-1 + C-0-0\\n2 compute only C-0-2").text())
    1 AG-Q-1 + C-0-0
    2 compute only C-0-2
    """

    steps: tuple[Step, ...]

    def order(self) -> tuple[Task, ...]:
        """Every task once: in each step the communication first, then the compute tasks."""
        return tuple(task for step in self.steps for task in step.tasks())

    def text(self) -> str:
        return "\n".join(f"{number} {step.text()}" for number, step in enumerate(self.steps, 1))

    @staticmethod
    def parse(text: str) -> Schedule:
        """The inverse of `text`; blank lines are ignored, step numbers must count from 1."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return Schedule(tuple(_parse_step(line, number) for number, line in enumerate(lines, 1)))


def _parse_step(line: str, number: int) -> Step:
    label, _, body = line.partition(" ")
    if label != str(number):
        raise ValueError(f"step {number} is written as {line!r}; it must begin with its number")
    head, _, tail = body.partition(" + ")
    if body.startswith(_COMPUTE_ONLY):
        head, tail = "", body.removeprefix(_COMPUTE_ONLY)
    try:
        compute = tuple(map(Task.parse, tail.split(", "))) if tail else ()
        return Step(Task.parse(head) if head else None, compute)
    except ValueError as error:
        raise ValueError(f"step {number} has a malformed task name: {error}") from error


def follow_each_other(slices: Sequence[Schedule]) -> Schedule:
    """
    >>> slices = [Schedule.parse(f"1 AG-{h}\\n2 compute only C-{h}\\n3 RS-{h}") for h in range(3)]
    >>> print(follow_each_other(slices).text())
    1 AG-0
    2 AG-1 + C-0
    3 AG-2
    4 RS-0 + C-1
    5 RS-1 + C-2
    6 RS-2
    """
    before, middle, after = zip(*map(_parts, slices), strict=True)
    steps: list[Step] = [*before[0]]
    of_next, of_last = (*before[1:], ()), ((), *after[:-1])
    for gathers, computing, reductions in zip(of_next, middle, of_last, strict=True):
        steps += _beside([*gathers, *reductions], computing)
    return Schedule((*steps, *after[-1]))


def one_after_another(slices: Sequence[Schedule]) -> Schedule:
    """No slice begins before the one before it is done: the least memory, and nothing hidden."""
    return Schedule(tuple(step for schedule in slices for step in schedule.steps))


def reduced_early(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """The schedule with reductions after the last gather moved forward: each comes before the first
    computation that begins after the reduction is ready, because links have nothing else to do
    then. In the paper's steps a computation stands beside one reduction only, and the other
    reductions come when all is computed."""
    needs = graph.needs()
    communications = [step.communication for step in schedule.steps]
    gathers = [at for at, task in enumerate(communications) if task and not needs[task]]
    last = gathers[-1] if gathers else 0
    waiting = [task for task in communications[last:] if task and needs[task]]
    steps: list[tuple[Task | None, list[Task]]] = [
        (step.communication, list(step.compute)) for step in schedule.steps[:last]
    ]
    done = {task for step in schedule.steps[:last] for task in step.tasks()}
    if gathers:
        steps.append((communications[last], []))
    for step in schedule.steps[last:]:
        for compute in step.compute:
            ready = [task for task in waiting if done.issuperset(needs[task])]
            waiting = [task for task in waiting if task not in ready]
            steps += [(task, []) for task in ready]
            if not steps or steps[-1][0] in needs[compute]:  # it does not hide what it waits for
                steps.append((None, []))
            steps[-1][1].append(compute)
            done.add(compute)
    steps += [(task, []) for task in waiting]
    return Schedule(tuple(Step(task, tuple(computes)) for task, computes in steps))


def _parts(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Communications before the first computation, all steps up to the last, and those after it."""
    steps = schedule.steps
    computes = [at for at, step in enumerate(steps) if step.compute]
    first, last = (computes[0], computes[-1]) if computes else (len(steps), len(steps) - 1)
    return steps[:first], steps[first : last + 1], steps[last + 1 :]


def _beside(communications: Sequence[Step], middle: Sequence[Step]) -> list[Step]:
    """The steps one after the other, but the last of the communications stands beside the first
    computations if no other communication does."""
    if not (communications and middle and middle[0].communication is None):
        return [*communications, *middle]
    *others, last = communications
    return [*others, Step(last.communication, middle[0].compute), *middle[1:]]
