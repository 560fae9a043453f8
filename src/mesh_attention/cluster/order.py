"""For what each operation of a rank waits, by the way communication and computation overlap.

`events`: for its own inputs, as the executor does. `strict`: both halves of a step finish before
the next step begins, as the paper does. `none`: one operation at a time.
"""

from __future__ import annotations

from enum import StrEnum

from mesh_attention.errors import PlanError
from mesh_attention.plan.dependencies import dependencies, is_communication
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Free, Program, reads, writes
from mesh_attention.plan.schedule.tasks import Schedule
from mesh_attention.plan.workspace import workspace_map

__all__ = ["Overlap", "Waits", "an_overlap"]

WaitsOfOps = tuple[tuple[int, ...], ...]
Signature = tuple[object, object]


class Overlap(StrEnum):
    NONE = "none"
    STRICT = "strict"
    EVENTS = "events"


def an_overlap(value: Overlap | str) -> Overlap:
    try:
        return Overlap(value)
    except ValueError:
        known = ", ".join(Overlap)
        raise PlanError(f"overlap={value!r} is unknown; known: {known}") from None


class Waits:
    """The waits of every rank. Ranks whose programs use alike buffers alike wait alike, whatever
    their members and calls are, so they are worked out once for all of them."""

    def __init__(self, plan: Plan, one: Pass, overlap: Overlap) -> None:
        self._plan, self._one, self._overlap = plan, one, overlap
        self._known: dict[Signature, WaitsOfOps] = {}
        self.workspace_bytes = 0  # of the ranks seen so far, the most

    def of(self, rank: int) -> WaitsOfOps:
        program = self._one.programs[rank]
        signature = _signature(program, self._plan.problem)
        known = self._known.get(signature)
        if known is None:
            memory = workspace_map(program, self._plan.problem)
            self.workspace_bytes = max(self.workspace_bytes, memory.total_bytes)
            known = dependencies(program, memory)
            if self._overlap is Overlap.NONE:
                known = tuple((at - 1,) if at else () for at in range(len(program.operations)))
            if self._overlap is Overlap.STRICT:
                known = _by_steps(program, self._one.schedule, known)
            known = self._known[signature] = _last_of_each_lane(program, known)
        return known


def _last_of_each_lane(program: Program, waits: WaitsOfOps) -> WaitsOfOps:
    """Simulated lanes work in order, so the last wait on a lane covers the earlier ones."""
    lane = [is_communication(op) for op in program.operations]
    result = []
    for befores in waits:
        last: dict[bool, int] = {}
        for before in befores:  # ascending
            last[lane[before]] = before
        result.append(tuple(last.values()))
    return tuple(result)


def _signature(program: Program, problem: Problem) -> Signature:
    """All that dependencies and offsets are made from."""
    sizes = tuple((b.name, b.role, b.num_bytes(problem)) for b in program.buffers)
    uses = tuple(
        op.buffers
        if isinstance(op, Free)
        else (op.name, type(op), tuple(reads(op)), tuple(writes(op)))
        for op in program.operations
    )
    return sizes, uses


def _by_steps(program: Program, schedule: Schedule, waits: WaitsOfOps) -> WaitsOfOps:
    """Each operation also waits for the last ones, on either lane, of the steps before its own."""
    step_of = {task: number for number, step in enumerate(schedule.steps) for task in step.tasks()}
    before: dict[bool, int] = {}  # by lane: the last operation of earlier steps
    latest: dict[bool, int] = {}  # by lane: the last operation so far
    now = -1
    result = []
    for at, op in enumerate(program.operations):
        # Helpers are named after their task, "RS-Q-0.cast"; what has no task goes with the last.
        step = step_of.get(op.task.whole, now)
        if step > now:
            now, before = step, dict(latest)
        result.append(tuple(sorted({*waits[at], *before.values()})))
        if not isinstance(op, Free):
            latest[is_communication(op)] = at
    return tuple(result)
