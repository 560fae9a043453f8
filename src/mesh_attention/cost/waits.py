"""Which operations of its rank each operation waits for, by the way that both streams overlap.

`events`: it waits for its own inputs, as in the executor. `strict`: both halves of a step end
before the next step begins, as in the paper. `none`: operations run one at a time. Estimate and
simulator both begin an operation when those it waits for are done.
"""

from __future__ import annotations

from enum import StrEnum

from mesh_attention.cost.operation_costs import Compiled
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.program import Communication, Free, Program
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.workspace import dependencies, workspace_map

WaitsOfOps = tuple[tuple[int, ...], ...]


class Overlap(StrEnum):
    NONE = "none"
    STRICT = "strict"
    EVENTS = "events"


def waits_of_rank(
    compiled: Compiled, rank: int, overlap: Overlap, *, at_once: bool
) -> tuple[WaitsOfOps, int]:
    """The waits of one rank's operations, and the bytes of its workspace. `at_once`: transfers do
    not follow each other."""
    program = compiled.pass_.programs[rank]
    memory, waits = workspace_map(program, compiled.plan.problem), compiled.waits.get(rank)
    if waits is None:
        waits = dependencies(program, memory)
    if overlap is Overlap.NONE:
        waits = tuple((at - 1,) if at else () for at in range(len(program.operations)))
    if overlap is Overlap.STRICT:
        waits = _by_steps(program, compiled.pass_.schedule, waits)
    if not at_once:
        waits = _last_on_each_stream(program, waits)
    return waits, memory.total_bytes


def transfers_at_once(cluster: Cluster, overlap: Overlap) -> bool:
    """Whether transfers of a rank run beside each other. Steps and single operations end before the
    next begin, whoever drives transfers."""
    return bool(cluster.host_driven) and overlap is Overlap.EVENTS


def _last_on_each_stream(program: Program, waits: WaitsOfOps) -> WaitsOfOps:
    """Simulated streams work in order, so the last wait on a stream covers the earlier ones."""
    stream = [isinstance(op, Communication) for op in program.operations]
    # Waits are ascending: of those on a stream the last stays.
    return tuple(
        tuple({stream[before]: before for before in befores}.values()) for befores in waits
    )


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
