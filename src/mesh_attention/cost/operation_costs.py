"""A pass compiled for a cluster: the seconds of its operations, and which ones each waits for.

`compiled_on` makes what `estimate.py` and `simulator.py` time. `OperationCosts` is the interface of
costs, as long as nothing disturbs an operation; `ClusterCosts` implements it by the descriptions of
a cluster and of its kernels. A computation is a few `TimedCall`s, which say how long they last and
how they share the GPU with transfers.

`waits_of_rank` says which operations of its rank each waits for, by the way that both streams
overlap. `events`: it waits for its own inputs, as in the executor. `strict`: both halves of a step
end before the next step begins, as in the paper. `none`: operations run one at a time. Estimate and
simulator both begin an operation when those it waits for are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from mesh_attention.cost.planning import target_on
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.machine.seconds import (
    CallSize,
    filled_rounds,
    late_pairs,
    lost_by_leaving,
    memory_seconds,
    num_tiles,
)
from mesh_attention.machine.tables import ClusterError
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Attention,
    Call,
    CallKind,
    Collective,
    Communication,
    Free,
    Merge,
    Operation,
    Program,
)
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.traffic import Flows, SharedFlows
from mesh_attention.plan.language.workspace import dependencies, workspace_map
from mesh_attention.plan.passes.compile import PassCompiler, Waits
from mesh_attention.plan.passes.seconds import CallSeconds, TransferCosts

_ROUNDING_SECONDS = 1e-9  # less than this of a round is left by rounding
_ENDS_OF_A_ROUND = 2  # programs of a round are not alike: fitted to 24 replayed backward passes


class TimedCall(NamedTuple):
    """A kernel call, or several that share the GPU alike.

    `late`: how much longer it takes if it begins beside a communication that began on an idle GPU,
    since some of its programs find no place. When that communication ends, no more than `seconds`
    are left.
    """

    seconds: float
    kernel: str = ""  # none for a pass over memory
    waits: bool = False  # no communication begins before its end
    lost: float | None = None  # part of its speed beside a communication; None: of the cluster
    round: float = 0.0  # seconds after which programs end, so that a communication may begin; or 0
    late: float = 0.0

    def until_sms(self, left: float) -> float:
        """Seconds until a communication finds SMs, when `left` seconds of the call are left."""
        rest = left % self.round if self.round else 0.0
        return rest if _ROUNDING_SECONDS < rest < self.round - _ROUNDING_SECONDS else 0.0

    def joins(self, before: TimedCall) -> bool:
        """Whether it can be one call with its predecessor: fewer events for a simulation."""
        return not self.waits and self[1:4] == before[1:4]


class OperationCosts(Protocol):
    """Seconds of operations when nothing disturbs them. Tests have costs of their own."""

    def compute(self, op: Operation, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        """The kernel calls of an operation, in turn."""
        ...

    def collective(self, op: Collective, flows: Flows, member: int) -> float: ...

    def flow(self, source: int, target: int, num_bytes: int) -> float: ...


class ClusterCosts:
    """Costs of a pass by the descriptions of a cluster and of its kernels."""

    def __init__(self, plan: Plan, clock: CallSeconds, transfers: TransferCosts) -> None:
        target = self._target = clock.target
        self._problem, self._clock = plan.problem, clock
        self._two_streams = target.takes_turns and clock.direction is Direction.FORWARD
        self._beside = plan.num_ranks > 1 and target.own_stream
        self.collective, self.flow = transfers.collective, transfers.flow

    def compute(self, op: Operation, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        match op:
            case Attend() | AttendBackward():
                return self._attention(op, table)
            case Merge():
                touched = (*op.inputs, *op.outputs)
                moved = sum(p.num_bytes(table[p.buffer], self._problem) for p in touched)
                return (TimedCall(memory_seconds(self._target.gpu, moved)),)
            case Free():
                return ()
        raise AssertionError(op)  # communication has costs of its own

    def _attention(self, op: Attention, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        fresh = self._clock.fresh(op) if len(op.calls) == 1 else (False, False)
        calls: list[TimedCall] = []
        sizes = self._clock.sizes(op, table)
        leaving = any(call.leave_sms for call in op.calls)
        for at, (call, size) in enumerate(zip(op.calls, sizes, strict=True)):
            timed = self._call(call, size, self._rounds(op, sizes, at) if leaving else None)
            # Calls take turns on two streams: a result is merged while the next call runs.
            if not self._two_streams or at + 1 == len(op.calls):
                merge = self._clock.merge(size, fresh)
                timed = timed._replace(seconds=timed.seconds + merge)
            if calls and timed.joins(calls[-1]):
                before = calls.pop()
                timed = before._replace(
                    seconds=before.seconds + timed.seconds,
                    round=max(before.round, timed.round),
                    late=before.late + timed.late,
                )
            calls.append(timed)
        return tuple(calls)

    def _rounds(self, op: Attention, sizes: Sequence[CallSize], at: int) -> float | None:
        """How many rounds the call `at` lasts if it is a part of a call that was split so that the
        second part leaves SMs: both parts together last a whole number of rounds. Otherwise
        None."""
        first = at if not op.calls[at].leave_sms else at - 1
        if not 0 <= first < len(op.calls) - 1:
            return None
        a, b = op.calls[first : first + 2]
        rates = self._rates(a)
        alike = (a.kind, a.k_start, a.k_stop, a.q_stop) == (b.kind, b.k_start, b.k_stop, b.q_start)
        split = alike and b.leave_sms and not a.leave_sms and a.kind is CallKind.FULL
        if not split or not rates.tile_rows:
            return None
        sms = self._target.gpu.sms
        before, after = (num_tiles(rates, size) for size in sizes[first : first + 2])
        return before / sms if at == first else filled_rounds(before + after, sms) - before / sms

    def _call(self, call: Call, size: CallSize, rounds: float | None) -> TimedCall:
        """A call with its seconds. One that leaves SMs loses them while a transfer is in flight.
        One that could leave SMs and does not keeps transfers waiting."""
        rates, sms = self._rates(call), self._target.gpu.sms
        seconds = self._clock.kernel(rates, size, rounds)
        assert seconds is not None, f"{call.kernel} does no {size.kind} calls"
        waits, lost, late = False, rates.lost(sms), 0.0
        if self._beside and call.leave_sms:
            lost = lost_by_leaving(rates, sms, size, call.leave_sms)
            late = seconds * late_pairs(rates, sms, size, call.leave_sms)
        elif self._beside:
            waits = not rates.lets_transfers_begin or bool(rates.sm_margin)
        keys, interval = rates.tile_keys, 0.0
        if keys and self._beside:
            programs = -(-size.columns // keys) * size.heads
            interval = seconds / (_ENDS_OF_A_ROUND * -(-programs // sms))
        return TimedCall(seconds, call.kernel, waits=waits, lost=lost, round=interval, late=late)

    def _rates(self, call: Call) -> PassRates:
        rates = self._clock.rates(call)
        assert rates is not None, f"no kernel for {self._clock.direction} calls"
        return rates


class Compiled(NamedTuple):
    """A pass as it is timed, and what its ranks have in common."""

    plan: Plan  # as it was asked for
    pass_: Pass  # with the compiled programs
    costs: OperationCosts
    target: Target | None  # of the programs; None where the caller has costs of its own
    transfers: TransferCosts  # which know how groups lie on nodes
    flows: SharedFlows  # sizes of transfers
    # For ranks whose programs were compiled just now: what each operation must come after, and a
    # number that is equal where buffers are alike.
    waits: Mapping[int, Waits]
    tables: Mapping[int, int]


def compiled_on(
    plan: Plan | Compiled, direction: Direction | str, cluster: Cluster, kernel: str | None = None
) -> Compiled:
    """The pass compiled for the cluster, unless it is already. `kernel`: see `target_on`."""
    if isinstance(plan, Compiled):
        return plan
    pass_, target = plan.direction(direction), plan.target
    if target is None:
        target = target_on(cluster, plan, kernel)
        made = PassCompiler(plan, pass_, target)
        costs = ClusterCosts(plan, made.clock, made.transfers)
        common = made.transfers, made.flows, made.waits, made.tables
        return Compiled(plan, made.all_programs(), costs, target, *common)
    if kernel is not None:
        raise ClusterError(
            f"kernel={kernel}: the plan is compiled for {target.name}; give it as it was"
        )
    transfers = TransferCosts(cluster.links, plan, pass_)
    costs = ClusterCosts(plan, CallSeconds(plan, pass_.direction, target), transfers)
    return Compiled(plan, pass_, costs, target, transfers, SharedFlows(plan.problem), {}, {})


class Overlap(StrEnum):
    NONE = "none"
    STRICT = "strict"
    EVENTS = "events"


def waits_of_rank(
    compiled: Compiled, rank: int, overlap: Overlap, *, at_once: bool
) -> tuple[Waits, int]:
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


def _last_on_each_stream(program: Program, waits: Waits) -> Waits:
    """Simulated streams work in order, so the last wait on a stream covers the earlier ones."""
    stream = [isinstance(op, Communication) for op in program.operations]
    # Waits are ascending: of those on a stream the last stays.
    return tuple(
        tuple({stream[before]: before for before in befores}.values()) for befores in waits
    )


def _by_steps(program: Program, schedule: Schedule, waits: Waits) -> Waits:
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
