"""For what each operation of a rank waits, by the way communication and computation overlap.

`events`: for its own inputs, as the executor does. `strict`: both halves of a step finish before
the next step begins, as the paper does. `none`: one operation at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication, Free, Program
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.workspace import Alike, dependencies, workspace_map

WaitsOfOps = tuple[tuple[int, ...], ...]


class Overlap(StrEnum):
    NONE = "none"
    STRICT = "strict"
    EVENTS = "events"


class Waits:
    """The waits of every rank, worked out once for those that are alike."""

    def __init__(
        self,
        plan: Plan,
        one: Pass,
        overlap: Overlap,
        alike: Alike,
        *,
        at_once: bool,
        compiled: Mapping[int, WaitsOfOps],
    ) -> None:
        """`compiled`: those of ranks whose programs were compiled just now."""
        self._plan, self._one, self._overlap, self._alike = plan, one, overlap, alike
        self._at_once, self._compiled = at_once, compiled
        self._known: dict[object, WaitsOfOps] = {}
        self.workspace_bytes = 0  # of the ranks seen so far, the most

    def of(self, rank: int) -> WaitsOfOps:
        program, waits = self._one.programs[rank], self._compiled.get(rank)
        key = self._alike.uses(program) if waits is None else id(waits)
        known = self._known.get(key)
        if known is None:
            known, num_bytes = waits_of_rank(
                *(self._plan, self._one, self._overlap, rank), at_once=self._at_once, waits=waits
            )
            self.workspace_bytes = max(self.workspace_bytes, num_bytes)
            self._known[key] = known
        return known


def waits_of_rank(
    plan: Plan,
    one: Pass,
    overlap: Overlap,
    rank: int,
    *,
    at_once: bool,
    waits: WaitsOfOps | None = None,
) -> tuple[WaitsOfOps, int]:
    """Of one rank by itself, with the bytes of its workspace. `at_once`: transfers do not follow
    each other. `waits`: the operations that each must come after, where they are known."""
    program = one.programs[rank]
    memory = workspace_map(program, plan.problem)
    if waits is None:
        waits = dependencies(program, memory)
    if overlap is Overlap.NONE:
        waits = tuple((at - 1,) if at else () for at in range(len(program.operations)))
    if overlap is Overlap.STRICT:
        waits = _by_steps(program, one.schedule, waits)
    if not at_once:
        waits = _last_on_each_stream(program, waits)
    return waits, memory.total_bytes


def transfers_at_once(cluster: Cluster, overlap: Overlap) -> bool:
    """Steps and single operations end before the next begin, whoever drives transfers."""
    return bool(cluster.host_driven) and overlap is Overlap.EVENTS


def _last_on_each_stream(program: Program, waits: WaitsOfOps) -> WaitsOfOps:
    """Simulated streams work in order, so the last wait on a stream covers the earlier ones."""
    stream = [isinstance(op, Communication) for op in program.operations]
    result = []
    for befores in waits:
        last: dict[bool, int] = {}
        for before in befores:  # ascending
            last[stream[before]] = before
        result.append(tuple(last.values()))
    return tuple(result)


def _by_steps(program: Program, schedule: Schedule, waits: WaitsOfOps) -> WaitsOfOps:
    """Each operation also waits for the last ones, on both streams, of the steps before it."""
    step_of = {task: number for number, step in enumerate(schedule.steps) for task in step.tasks()}
    before: dict[bool, int] = {}  # by stream: the last operation of earlier steps
    latest: dict[bool, int] = {}  # by stream: the last operation so far
    now = -1
    result = []
    for at, op in enumerate(program.operations):
        # What has no place in the schedule goes with the step before it.
        step = step_of.get(op.task.whole, now)
        if step > now:
            now, before = step, dict(latest)
        result.append(tuple(sorted({*waits[at], *before.values()})))
        if not isinstance(op, Free):
            latest[isinstance(op, Communication)] = at
    return tuple(result)
