"""Long kernel calls in pieces, so that communication can begin between them.

The attention kernels of Hopper fill every multiprocessor and hold it until the call is over: a
communication kernel that becomes ready meanwhile has to wait, and so at most one of them begins for
every call. Where a program has more communications than attentions, its rectangles are therefore
cut by queries into as many pieces; every piece has rows of its own to merge, and calls take turns
on two streams (`runtime/streams.py`), so that cuts cost next to nothing.

The backward pass is left whole: it lasts longer beside its communications, and each piece of it
would add up one more dQ, or dK and dV.

The executor cuts so, and the simulator to know when a communication may begin.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.program import Attend, Call, CallKind, Program

__all__ = ["split_calls", "split_long_calls", "splits_wanted"]

_ROWS = 128  # of a kernel's own tiles
_LEAST_TILES = 256  # of a piece: fewer would not fill a GPU twice


def split_long_calls(program: Program) -> Program:
    wanted = splits_wanted(program)
    table = program.buffer_table()

    def cut(op: Attend) -> Attend:
        pieces = split_calls(op, op.q.num_heads(table[op.q.buffer]), wanted)
        calls = tuple(piece for of_call in pieces for piece in of_call)
        return replace(op, calls=calls) if len(calls) > len(op.calls) else op

    return replace(
        program,
        operations=tuple(cut(op) if isinstance(op, Attend) else op for op in program.operations),
    )


def splits_wanted(program: Program) -> int:
    """Communications for each attention of the forward pass, rounded up."""
    attentions = sum(isinstance(op, Attend) for op in program.operations)
    communications = sum(map(is_communication, program.operations))
    return -(-communications // attentions) if attentions else 1


def split_calls(op: Attend, heads: int, wanted: int) -> list[list[Call]]:
    """Each call of an attention, all together in so many pieces, or as many as can fill a GPU."""
    area = sum(_area(call) for call in op.calls)
    return [_pieces(call, heads, round(wanted * _area(call) / area)) for call in op.calls]


def _area(call: Call) -> int:
    return (call.q_stop - call.q_start) * (call.k_stop - call.k_start)


def _pieces(call: Call, heads: int, wanted: int) -> list[Call]:
    tiles = -(-(call.q_stop - call.q_start) // _ROWS)
    count = min(wanted, tiles * heads // _LEAST_TILES)
    if call.kind is not CallKind.FULL or count < 2:
        return [call]
    bounds = [call.q_start + i * tiles // count * _ROWS for i in range(count)] + [call.q_stop]
    return [replace(call, q_start=a, q_stop=b) for a, b in pairwise(bounds)]
