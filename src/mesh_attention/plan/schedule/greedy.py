"""Greedy overlap scheduling, to the letter of the paper (algorithm, section 5).

Each step takes the communication task with the highest profit (compute time it newly unlocks
over its own time) and fills it with compute tasks that were ready when the step began. It is
the reference that `search` is measured against, and the engine of `greedy_capped`, which only
adds a veto on each action.

Reading of "lowest-index unscheduled chunk, RS only when ready": the lowest-index one *that is
ready*. Gathers are always ready, so for them nothing changes; empty or unequal tasks can
finish Q chunk 1 before Q chunk 0, and waiting for RS-Q-0 would leave the stream idle for nothing
(and, under a memory cap, could hold the very buffers that RS-Q-0 waits for).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Schedule, Step, TaskGraph, TaskNode

# Answers: with these tasks done, may this one be issued next?
Permission = Callable[[Set[Task], Task], bool]

# Costs are sums of measured times: equal up to rounding counts as equal, so that ties go to
# the earlier kind on every machine.
_ROUNDING = 1e-9


def greedy(graph: TaskGraph, *, gamma: float = 1.05) -> Schedule:
    """The paper's schedule; a pure function, so all ranks derive the same order."""
    return greedy_with_permission(graph, lambda done, name: True, gamma=gamma)


def greedy_with_permission(graph: TaskGraph, permits: Permission, *, gamma: float) -> Schedule:
    """`greedy` over the actions that `permits` allows; some action must always be allowed."""
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
    """At most one task a kind, in kind order: the lowest-index ready one that is permitted."""
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
