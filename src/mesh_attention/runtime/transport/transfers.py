"""One form for all communications: which pieces a member sends to, and receives from, which member.

Transports read operations in this form and know no others. `verify` keeps its own reading on
purpose: what proves a plan must not share the mistakes of what runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
)

Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """By member of the group, itself included: what stays is copied.

    `sends[a][i]` of member b lands in `receives[b][i]` of member a. With `adds` all members send to
    the same places, and what arrives there is added up in the order of the members.
    """

    sends: tuple[Pieces, ...]
    receives: tuple[Pieces, ...]
    adds: bool = False


@lru_cache(maxsize=1024)
def transfers(op: Communication, size: int) -> Transfers:
    """Of one member's operation, in a group of `size` members."""
    match op:
        case AllToAll():
            return Transfers(op.sends, op.receives)
        case SendRecv():
            sends = tuple(op.sends if to == op.to_member else () for to in range(size))
            receives = tuple(op.receives if m == op.from_member else () for m in range(size))
            return Transfers(sends, receives)
    parts = tuple(_rows(move.part, a, b - a) for move in op.moves for a, b in pairwise(move.cuts))
    places = tuple(
        tuple(piece for move in op.moves for piece in _places(move, member, size))
        for member in range(size)
    )
    if isinstance(op, AllGather):
        return Transfers((parts,) * size, places)
    assert isinstance(op, ReduceScatter)
    return Transfers(places, (parts,) * size, adds=True)


def _places(move: Move, member: int, size: int) -> Iterator[Piece]:
    """Where a member's part lies in the whole: each stretch of it after those of lower members."""
    begin = 0
    for a, b in pairwise(move.cuts):
        yield _rows(move.whole, begin + member * (b - a), b - a)
        begin += size * (b - a)


def _rows(piece: Piece, start: int, num_rows: int) -> Piece:
    if num_rows == piece.num_rows:
        return piece
    first = piece.start + start
    return Piece(piece.buffer, first, first + num_rows, piece.heads)
