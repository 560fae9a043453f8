"""Long kernel calls in pieces, so that communication can begin between them.

The attention kernels of Hopper fill every multiprocessor and hold it until the call is over: a
communication kernel that becomes ready meanwhile has to wait, and so at most one of them begins for
every call. Where a program has more communications than attentions, its rectangles are therefore
cut by queries into as many pieces; every piece has rows of its own to merge, and calls take turns
on two streams (`lanes.py`), so that cuts cost next to nothing.

The backward pass is left whole: it lasts longer beside its communications, and each piece of it
would add up one more dQ, or dK and dV.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.program import Attend, Call, CallKind, Program

__all__ = ["in_pieces"]

_ROWS = 128  # of a kernel's own tiles
_LEAST_TILES = 256  # of a piece: fewer would not fill a GPU twice


def in_pieces(program: Program) -> Program:
    attentions = sum(isinstance(op, Attend) for op in program.operations)
    if not attentions:
        return program
    communications = sum(map(is_communication, program.operations))
    wanted = -(-communications // attentions)
    table = program.buffer_table()

    def cut(op: Attend) -> Attend:
        heads = op.q.num_heads(table[op.q.buffer])
        area = sum(_area(call) for call in op.calls)
        calls = [
            piece
            for call in op.calls
            for piece in _pieces(call, heads, round(wanted * _area(call) / area))
        ]
        return replace(op, calls=tuple(calls)) if len(calls) > len(op.calls) else op

    return replace(
        program,
        operations=tuple(cut(op) if isinstance(op, Attend) else op for op in program.operations),
    )


def _area(call: Call) -> int:
    return (call.q_stop - call.q_start) * (call.k_stop - call.k_start)


def _pieces(call: Call, heads: int, wanted: int) -> list[Call]:
    tiles = -(-(call.q_stop - call.q_start) // _ROWS)
    count = min(wanted, tiles * heads // _LEAST_TILES)
    if call.kind is not CallKind.FULL or count < 2:
        return [call]
    bounds = [call.q_start + i * tiles // count * _ROWS for i in range(count)] + [call.q_stop]
    return [replace(call, q_start=a, q_stop=b) for a, b in pairwise(bounds)]
