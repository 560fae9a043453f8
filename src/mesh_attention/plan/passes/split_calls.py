"""Long kernel calls are split, so that communication can begin between them.

Some attention kernels fill every multiprocessor and hold it until the call is over: a communication
kernel that becomes ready meanwhile has to wait, and so at most one of them begins for every call.
Where a program has more communications than attentions, full calls on such kernels are therefore
split by queries into as many; each has rows of its own to merge, and calls take turns on two
streams (`runtime/device/streams.py`), so that a split costs next to nothing.

The backward pass is left whole: it lasts longer beside its communications, and each further call
would add up one more dQ, or dK and dV.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, Call, CallKind, Communication, Program

TILE_ROWS = 128  # of a kernel's own tiles
_LEAST_TILES = 256  # of a call: fewer would not fill a GPU twice


def splits_wanted(program: Program) -> int:
    """Communications for each attention of the forward pass, rounded up."""
    attentions = sum(isinstance(op, Attend) for op in program.operations)
    communications = sum(isinstance(op, Communication) for op in program.operations)
    return -(-communications // attentions) if attentions else 1


def split_calls(op: Attend, heads: int, wanted: int, target: Target) -> Attend:
    """Calls that keep transfers waiting, split into so many together, or as many as can fill a
    GPU."""
    area = sum(_area(call) for call in op.calls)
    calls = [
        part
        for call in op.calls
        for part in _split(call, heads, round(wanted * _area(call) / area), target)
    ]
    return replace(op, calls=tuple(calls)) if len(calls) > len(op.calls) else op


def _area(call: Call) -> int:
    return (call.q_stop - call.q_start) * (call.k_stop - call.k_start)


def _split(call: Call, heads: int, wanted: int, target: Target) -> list[Call]:
    tiles = -(-(call.q_stop - call.q_start) // TILE_ROWS)
    count = min(wanted, tiles * heads // _LEAST_TILES)
    if call.kind is not CallKind.FULL or count < 2 or not call.kernel:
        return [call]
    rates = target.kernels[call.kernel].of(Direction.FORWARD)
    if rates is None or rates.lets_transfers_begin:
        return [call]
    bounds = [call.q_start + i * tiles // count * TILE_ROWS for i in range(count)] + [call.q_stop]
    return [replace(call, q_start=a, q_stop=b) for a, b in pairwise(bounds)]
