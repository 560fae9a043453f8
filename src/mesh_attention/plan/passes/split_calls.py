"""Split long kernel calls so that transfers can begin, and have SMs to run on.

`compile.py` calls `split_calls` and then `leave_sms`; both change only the calls of attentions.

`split_calls`: some attention kernels fill every multiprocessor until the call is over. A transfer
that becomes ready meanwhile has to wait, so at most one begins for every call. Where a program has
more communications than attentions, full calls on such kernels are split by queries into as many.
Each part has rows of its own to merge, and calls take turns on two streams
(`runtime/device.py`), so a split costs next to nothing. The backward pass stays whole: it
lasts longer beside its communications, and each further call would add up one more dQ, or dK
and dV.

`leave_sms`: a kernel is asked to leave SMs before its call begins, and leaves them to its end,
though a transfer may last far less. So the rows of a long call are split: the first part has the
whole GPU, and the rest leaves SMs for as long as transfers are predicted to last. A transfer that
could not begin so far begins there, because it comes first wherever SMs fall free.

The programs of such kernels have a fixed share of the tiles each, so a full call lasts a whole
number of rounds. The second part begins where programs of the first have no tile left, so a last
round of few tiles costs no round of its own. A call stays whole where a cut saves no round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod

from mesh_attention.machine.seconds import (
    CallSize,
    late_pairs,
    lost_by_leaving,
    rounds_of_parts,
)
from mesh_attention.machine.target import SMS_OF_TRANSFERS, Target
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    Attend,
    Attention,
    Call,
    CallKind,
    Communication,
    Operation,
    Program,
)
from mesh_attention.plan.passes.seconds import CallSeconds

TILE_ROWS = 128  # of a kernel's own tiles
_LEAST_TILES = 256  # of a call: fewer would not fill a GPU twice
# SMs are left for this part of the time of the transfers in flight. Where the GPU waits for them,
# they last longer than predicted: they begin a merge later, and are slower beside computation.
# Elsewhere a transfer only needs SMs to begin on, and keeps them: 0.8 points of MFU more than with
# 1.3, the mean of 8 replays (benchmarks/results/2026-11-18-replay-sms-left-h200.json).
_WHERE_IT_WAITS, _ELSEWHERE = 1.3, 0.4
_CUT = 0.1  # rounds that a cut costs: one more call, and its merge


def splits_wanted(program: Program) -> int:
    """Communications for each attention of the forward pass, rounded up. Beside a single attention
    there are none: each brings what it reads, or takes what it made."""
    attentions = sum(isinstance(op, Attend) for op in program.operations)
    communications = sum(isinstance(op, Communication) for op in program.operations)
    return -(-communications // attentions) if attentions > 1 else 1


def split_calls(op: Attend, heads: int, wanted: int, target: Target) -> Attend:
    """The attention with calls that keep transfers waiting split into `wanted` parts in all, or as
    many as can fill a GPU."""
    area = sum(_area(call) for call in op.calls)
    calls = [
        part
        for call in op.calls
        for part in _split(call, heads, round(wanted * _area(call) / area), target)
    ]
    return replace(op, calls=tuple(calls)) if len(calls) > len(op.calls) else op


def _area(call: Call) -> int:
    return prod(call.size)


def _split(call: Call, heads: int, wanted: int, target: Target) -> list[Call]:
    tiles = -(-call.size[0] // TILE_ROWS)
    count = min(wanted, tiles * heads // _LEAST_TILES)
    if call.kind is not CallKind.FULL or count < 2 or not call.kernel:
        return [call]
    rates = target.kernels[call.kernel].of(Direction.FORWARD)
    if rates is None or rates.lets_transfers_begin:
        return [call]
    bounds = [call.q_start + i * tiles // count * TILE_ROWS for i in range(count)] + [call.q_stop]
    return [replace(call, q_start=a, q_stop=b) for a, b in pairwise(bounds)]


def leave_sms(
    program: Program,
    waits: Sequence[tuple[int, ...]],
    transfer_seconds: Callable[[Communication], float],
    clock: CallSeconds,
) -> Program:
    """The program whose calls leave SMs to the transfers in flight. `waits`: the operations that
    each must come after. A slice of a GPU has no SMs to leave."""
    attentions = (op for op in program.operations if isinstance(op, Attention))
    if clock.target.gpu.sms <= SMS_OF_TRANSFERS or not any(
        _margin(call, clock) for op in attentions for call in op.calls
    ):
        return program
    table = program.buffer_table()
    in_flight: dict[int, float] = {}  # seconds that are left
    operations: list[Operation] = []
    for at, op in enumerate(program.operations):
        operations.append(op)
        if isinstance(op, Communication):
            in_flight[at] = transfer_seconds(op)
            continue
        # Transfers end in their order, so all before an awaited transfer have ended too.
        last = max((i for i in waits[at] if i in in_flight), default=-1)
        idle = last >= 0 and in_flight[last] > 0  # the GPU waits, and the next transfer begins then
        if last >= 0:
            in_flight = {i: left for i, left in in_flight.items() if i > last}
        if not in_flight or not isinstance(op, Attention) or not op.calls:
            continue
        if not all(call.kernel for call in op.calls):
            continue
        passed = clock.attention(op, table)
        if any(_margin(call, clock) for call in op.calls):
            rate = sum(map(_pairs, op.calls)) / passed if passed else 0.0  # pairs a second
            needed = (_WHERE_IT_WAITS if idle else _ELSEWHERE) * sum(in_flight.values()) * rate
            heads = op.q.num_heads(table[op.q.buffer])
            made = replace(op, calls=_parts(op.calls, heads, needed, clock))
            # Otherwise whatever is in flight waits for the end of the attention.
            if _longer(made, table, clock) <= sum(in_flight.values()):
                operations[-1] = _with_room_for_pairs(made, table, clock) if idle else made
        for i, left in tuple(in_flight.items()):
            in_flight[i] = max(0.0, left - passed)
            passed = max(0.0, passed - left)
    return replace(program, operations=tuple(operations))


def _margin(call: Call, clock: CallSeconds) -> int:
    """SMs that the kernel of a call leaves where it is asked to."""
    rates = clock.rates(call)
    return 0 if rates is None else rates.sm_margin


def _longer(op: Attention, table: Mapping[str, Buffer], clock: CallSeconds) -> float:
    """Seconds by which its calls last longer because few rounds of tiles become one more."""
    total, sms = 0.0, clock.target.gpu.sms
    for call, size in zip(op.calls, clock.sizes(op, table), strict=True):
        rates = clock.rates(call)
        if rates is None or not call.leave_sms:
            continue
        lost = lost_by_leaving(rates, sms, size, call.leave_sms)
        if lost > call.leave_sms / sms:
            total += (clock.kernel(rates, size) or 0.0) * lost / (1 - lost)
    return total


def _with_room_for_pairs(
    op: Attention, table: Mapping[str, Buffer], clock: CallSeconds
) -> Attention:
    """Beside a transfer that begins on an idle GPU, pairs of programs that find no place would
    double a call: more SMs are left then, so that all find one."""

    def with_room(call: Call, size: CallSize) -> Call:
        rates = clock.rates(call)
        if not call.leave_sms or rates is None or rates.pair_sms is None:
            return call
        late = late_pairs(rates, clock.target.gpu.sms, size, call.leave_sms)
        return call.by(call.kernel, rates.pair_sms) if late else call

    return replace(op, calls=tuple(map(with_room, op.calls, clock.sizes(op, table))))


def _pairs(call: Call) -> int:
    return _area(call) // 2 if call.kind is CallKind.CAUSAL else _area(call)


def _parts(
    calls: Sequence[Call], heads: int, needed: float, clock: CallSeconds
) -> tuple[Call, ...]:
    """The calls of an attention in parts, some of which leave SMs. `needed`: pairs of rows and keys
    that are computed while transfers last."""
    result: list[Call] = []
    for call in reversed(calls):
        parts = [(call, False)]
        margin = _margin(call, clock)
        if needed > 0 and margin:
            parts = _split_leaving(call, heads, clock.target.gpu.sms, margin, needed)
        needed -= sum(_pairs(part) for part, leaves in parts if leaves)
        result = [*[c.by(c.kernel, margin) if x else c for c, x in parts], *result]
    return tuple(result)


def _split_leaving(
    call: Call, heads: int, sms: int, margin: int, needed: float
) -> list[tuple[Call, bool]]:
    """The call in parts, and which of them leave SMs."""
    if call.kind is CallKind.RANGE:  # its rows may see little
        return [(call, True)]
    if call.kind is CallKind.CAUSAL:  # rows that could be split see less or more than others
        # Otherwise a transfer that becomes ready while the call runs begins after it.
        return [(call, needed > _pairs(call) / 2)]
    rows, keys = call.size
    tiles, least = -(-rows // TILE_ROWS) * heads, ceil(needed * heads / (TILE_ROWS * keys * sms))
    leaving = _leaving_tiles(tiles, heads, sms, margin, least)
    if not leaving:
        return [(call, True)]
    middle = call.q_stop - leaving * TILE_ROWS
    return [(replace(call, q_stop=middle), False), (replace(call, q_start=middle), True)]


@lru_cache(maxsize=4096)  # the calls of a ring are alike
def _leaving_tiles(tiles: int, heads: int, sms: int, margin: int, least: int) -> int:
    """Tiles of a head in the part that leaves SMs, which lasts at least `least` rounds; 0 where a
    cut saves no round."""
    fewer = sms - margin
    whole = -(-tiles // fewer)
    cuts = []
    for rounds in range(least, whole):
        leaving = rounds * fewer // heads
        rest = tiles - leaving * heads
        if leaving and rest > 0:
            cuts.append((rounds_of_parts(rest, leaving * heads, sms, margin) + _CUT, leaving))
    return min(cuts)[1] if cuts and min(cuts)[0] < whole else 0
