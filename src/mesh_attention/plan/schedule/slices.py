"""One schedule for slices of the heads that need the same tasks, one slice after the other.

Methods with head slices use these functions. A slice is gathered while the slice before it
computes, and reduced while the slice after it computes. So only the first gather and the last
reduction have nothing to hide behind, and both are as small as a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph


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
