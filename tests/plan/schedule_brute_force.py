"""Slow truth for the memory tests: the least peak over every order, not only the eager ones.

What is live depends only on the set of tasks that are done, so all orders are walked as the
paths through the sets that can be reached; the heaviest task on the lightest path is the answer.
"""

from __future__ import annotations

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import TaskGraph
from mesh_attention.plan.methods.parts.greedy import MemoryModel


def least_peak_bytes(graph: TaskGraph, model: MemoryModel) -> int:
    """Over all orders in which gathers of a kind keep index order; small graphs only."""
    before = graph.needs()
    for task in graph.communication:
        if not task.needs:
            before[task.task] = tuple(
                other.task
                for other in graph.communication
                if other.kind == task.kind and not other.needs and other.index < task.index
            )
    names = frozenset(before)
    to_go: dict[frozenset[Task], int] = {names: 0}

    def visit(done: frozenset[Task]) -> int:
        if done not in to_go:
            to_go[done] = min(
                max(peak_of(done, name), visit(done | {name}))
                for name in sorted(names - done, key=str)
                if done.issuperset(before[name])
            )
        return to_go[done]

    def peak_of(done: frozenset[Task], name: Task) -> int:
        """Bytes live at each operation of `name`, straight from the definition."""
        peak = 0
        for position in range(len(model.touches[name])):
            past = {b for t in done for op in model.touches[t] for b in op}
            past |= {b for op in model.touches[name][: position + 1] for b in op}
            future = {b for t in names - done - {name} for op in model.touches[t] for b in op}
            future |= {b for op in model.touches[name][position:] for b in op}
            peak = max(peak, sum(model.buffer_bytes[b] for b in past & future))
        return peak

    return visit(frozenset())


def peak_by_definition(model: MemoryModel, order: tuple[Task, ...]) -> int:
    """First and last operation of every buffer in the flat list of operations."""
    flat = [op for name in order for op in model.touches.get(name, ())]
    used = {b: [i for i, op in enumerate(flat) if b in op] for b in model.buffer_bytes}
    return max(
        (
            sum(
                model.buffer_bytes[b]
                for b, uses in used.items()
                if uses and uses[0] <= i <= uses[-1]
            )
            for i in range(len(flat))
        ),
        default=0,
    )
