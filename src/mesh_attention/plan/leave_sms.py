"""Which kernel calls leave multiprocessors to transfers: as much of an attention as those last.

A kernel is asked to leave SMs before its call begins, and leaves them to its end, though what is in
flight may last far less. So the rows of a long call are split: the first part has the whole GPU,
and the rest leaves SMs for as long as transfers are thought to last. A transfer that could not
begin so far begins there, because it comes first wherever SMs fall free; one that could has done so
before, and the programs that it kept waiting run beside the rest.

The programs of such kernels have a fixed share of the tiles each, so a full call lasts a whole
number of rounds. Of the two parts the second begins where programs of the first have no tile left,
so a last round of few tiles costs none of its own. A call stays whole where a cut saves no round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import (
    AllToAll,
    Attend,
    Attention,
    Call,
    CallKind,
    Communication,
    Operation,
    Program,
    SendRecv,
)
from mesh_attention.plan.split_calls import TILE_ROWS
from mesh_attention.plan.traffic import TrafficMeter
from mesh_attention.plan.way_costs import Rates

SMS_OF_TRANSFERS = 16  # NCCL's channels hold one each
_LONGER = 1.3  # than thought: a transfer begins a merge later, and is slower beside computation
_CUT = 0.1  # rounds that a cut costs: one more call, and its merge


@dataclass(frozen=True, slots=True)
class Leaving:
    """`calls`: for each attention beside a transfer, by its place, which of its calls leave SMs."""

    program: Program
    calls: Mapping[int, tuple[bool, ...]]


def leave_sms(
    program: Program,
    plan: Plan,
    one: Pass,
    waits: Sequence[tuple[int, ...]],
    *,
    sms: int,
    rates: Rates,
    split: bool = True,
) -> Leaving:
    """`waits`: the operations that each must come after. `sms`: of the GPU; a slice of one has none
    to leave. `split`: not where full calls cannot leave SMs."""
    if sms <= SMS_OF_TRANSFERS:
        return Leaving(program, {})
    table = program.buffer_table()
    transfers = _Transfers(plan, one, table, rates)
    in_flight: dict[int, float] = {}  # seconds that are left
    operations: list[Operation] = []
    found: dict[int, tuple[bool, ...]] = {}
    for at, op in enumerate(program.operations):
        operations.append(op)
        if isinstance(op, Communication):
            in_flight[at] = transfers.seconds(op)
            continue
        # They are done in their order, so those before one that is waited for are done too.
        last = max((i for i in waits[at] if i in in_flight), default=-1)
        in_flight = {i: left for i, left in in_flight.items() if i > last}
        if not in_flight or not isinstance(op, Attention):
            continue
        heads = op.q.num_heads(table[op.q.buffer])
        share = plan.problem.flops(1, backward=False) * heads / plan.problem.num_heads
        rate = rates.flops[0] / share  # pairs a second
        found[at] = (True,) * len(op.calls)
        if split and isinstance(op, Attend):
            needed = _LONGER * sum(in_flight.values()) * rate
            parts = _parts(op.calls, heads, sms, needed)
            operations[-1] = replace(op, calls=tuple([call for call, _ in parts]))
            found[at] = tuple([leaves for _, leaves in parts])
        passed = sum(map(_pairs, op.calls)) / rate
        for i, left in tuple(in_flight.items()):
            in_flight[i] = max(0.0, left - passed)
            passed = max(0.0, passed - left)
    return Leaving(replace(program, operations=tuple(operations)), found)


def leaves_whole(transfers: float, call: float) -> bool:
    """Whether a call that is not split leaves SMs, by how long both last, in any unit. Otherwise a
    transfer that comes while it runs begins after it."""
    return _LONGER * transfers > call / 2


class _Transfers:
    def __init__(self, plan: Plan, one: Pass, table: Mapping[str, Buffer], rates: Rates) -> None:
        self._plan, self._one, self._rates = plan, one, rates
        self._meter = TrafficMeter(plan.problem, table)

    def seconds(self, op: Communication) -> float:
        """Of a member of the group, whichever it is."""
        ranks, per_node = self._one.groups[op.group], self._rates.ranks_per_node
        nodes = [self._plan.devices[rank] // per_node for rank in ranks]
        received = {m: float(size) for m, (size, _) in self._meter.flows(op).received.items()}
        inside, between = sum(received.values()), 0.0
        if isinstance(op, AllToAll):
            by_node: dict[int, float] = {}
            for member, size in received.items():
                by_node[nodes[member]] = by_node.get(nodes[member], 0.0) + size
            # The most comes from a rank's own node, or as much as from any.
            between = inside - max(by_node.values(), default=0.0)
            inside -= between
        elif isinstance(op, SendRecv):
            between = inside if len(set(nodes)) > 1 else 0.0
            inside -= between
        else:  # members of a node bring in what comes from others, and pass it on
            here = len(ranks) / len(set(nodes))
            between = inside * (len(ranks) - here) / here
            inside *= len(ranks) - 1
        return self._rates.transfer(inside, between, len(ranks) - 1)


def _pairs(call: Call) -> int:
    area = (call.q_stop - call.q_start) * (call.k_stop - call.k_start)
    return area // 2 if call.kind is CallKind.CAUSAL else area


def _parts(calls: Sequence[Call], heads: int, sms: int, needed: float) -> list[tuple[Call, bool]]:
    """Of an attention, and whether they leave SMs. `needed`: pairs of rows and keys that are
    computed while transfers last."""
    found: list[tuple[Call, bool]] = []
    for call in reversed(calls):
        parts = _split(call, heads, sms, needed) if needed > 0 else [(call, False)]
        needed -= sum(_pairs(part) for part, leaves in parts if leaves)
        found = [*parts, *found]
    return found


def _split(call: Call, heads: int, sms: int, needed: float) -> list[tuple[Call, bool]]:
    if call.kind is CallKind.RANGE:  # who knows how little its rows see
        return [(call, True)]
    if call.kind is CallKind.CAUSAL:  # rows that could be split see less or more than others
        return [(call, leaves_whole(needed / _LONGER, _pairs(call)))]
    rows, keys = call.q_stop - call.q_start, call.k_stop - call.k_start
    tiles, fewer = -(-rows // TILE_ROWS) * heads, sms - SMS_OF_TRANSFERS
    whole = -(-tiles // fewer)
    cuts = []
    for rounds in range(ceil(needed * heads / (TILE_ROWS * keys * sms)), whole):
        leaving = rounds * fewer // heads  # tiles of a head
        rest = tiles - leaving * heads
        if leaving and rest > 0:
            cuts.append((_rounds(rest, leaving * heads, sms) + _CUT, leaving * TILE_ROWS))
    if not cuts or min(cuts)[0] >= whole:
        return [(call, True)]
    middle = call.q_stop - min(cuts)[1]
    return [(replace(call, q_stop=middle), False), (replace(call, q_start=middle), True)]


def _rounds(first: int, leaving: int, sms: int) -> int:
    """Of tiles with the whole GPU, and of those that follow and leave SMs. They begin on the SMs
    that have had one tile less, as far as transfers do not take those."""
    rounds, one_more = divmod(first, sms)
    others, others_more = divmod(leaving, sms - SMS_OF_TRANSFERS)
    soon = max(0, sms - one_more - SMS_OF_TRANSFERS)
    begin_late = one_more > 0 and others_more > soon
    return rounds + others + (one_more + others_more > 0) + begin_late
