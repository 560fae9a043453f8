"""One schedule for slices of the heads that need the same tasks, one slice after the other.

What a slice gathers before it can compute is gathered while the slice before it computes, and what
it reduces when it has computed goes while the slice after it computes. So only the first gather and
the last reduction have nothing to hide behind, and both are as small as a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph

__all__ = ["follow_each_other", "one_after_another", "reduced_early"]


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
    parts = [_Parts(schedule) for schedule in slices]
    steps: list[Step] = [*parts[0].before]
    for at, part in enumerate(parts):
        ahead = parts[at + 1].before if at + 1 < len(parts) else ()
        behind = parts[at - 1].after if at else ()
        steps += _beside([*ahead, *behind], part.middle)
    return Schedule((*steps, *parts[-1].after))


def one_after_another(slices: Sequence[Schedule]) -> Schedule:
    """No slice begins before the one before it is done: the least memory, and nothing hidden."""
    return Schedule(tuple(step for schedule in slices for step in schedule.steps))


def reduced_early(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """With every reduction that follows the last gather before the first computation that begins
    after it is ready: nothing else is left for the links to do. In the paper's steps a computation
    stands beside one reduction only, and the others come when all is computed."""
    needs = graph.needs()
    gathers = [at for at, step in enumerate(schedule.steps) if _is_gather(step, needs)]
    first = gathers[-1] if gathers else 0
    waiting = [
        task
        for step in schedule.steps[first:]
        if (task := step.communication) is not None and needs[task]
    ]
    steps: list[tuple[Task | None, list[Task]]] = [
        (step.communication, list(step.compute)) for step in schedule.steps[:first]
    ]
    done = {task for step in schedule.steps[:first] for task in step.tasks()}
    if gathers:
        steps.append((schedule.steps[first].communication, []))
    for step in schedule.steps[first:]:
        for compute in step.compute:
            ready = [task for task in waiting if done.issuperset(needs[task])]
            waiting = [task for task in waiting if task not in ready]
            steps += [(task, []) for task in ready]
            if not steps:
                steps.append((None, []))
            steps[-1][1].append(compute)
            done.add(compute)
    steps += [(task, []) for task in waiting]
    return Schedule(tuple(Step(task, tuple(computes)) for task, computes in steps))


def _is_gather(step: Step, needs: Mapping[Task, Sequence[Task]]) -> bool:
    return step.communication is not None and not needs[step.communication]


class _Parts:
    """Communications before the first computation, those after the last, and all in between."""

    def __init__(self, schedule: Schedule) -> None:
        steps = schedule.steps
        computes = [at for at, step in enumerate(steps) if step.compute]
        first, last = (computes[0], computes[-1]) if computes else (len(steps), len(steps) - 1)
        self.before = steps[:first]
        self.middle = steps[first : last + 1]
        self.after = steps[last + 1 :]


def _beside(communications: Sequence[Step], middle: Sequence[Step]) -> list[Step]:
    """The last of these communications takes the first computations along, where they are free."""
    if not (communications and middle and middle[0].communication is None):
        return [*communications, *middle]
    *others, last = communications
    return [*others, Step(last.communication, middle[0].compute), *middle[1:]]
