"""Runs of pieces: what a rank sends and receives in an exchange, in few parts.

Equal pieces of several members that lie side by side, in heads or in rows, are one `PieceRun`, and
so is a piece that goes to several members: one view, one copy and one split serve all these
members. `exchange.py` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport.interface import Transfers


class PieceRun(NamedTuple):
    """`piece` consists of equal pieces, one for each of these ranks, in this order, side by side in
    rows or in heads; or, with `apart` None, all of it is for each. `tag`: the number of these
    pieces between two ranks, the same on both sides. `sent`: they are sent, and not received."""

    piece: Piece
    ranks: tuple[int, ...]
    apart: Literal["rows", "heads"] | None
    tag: int
    sent: bool


def runs_of(moved: Transfers, ranks: Sequence[int], *, joined: bool = True) -> tuple[PieceRun, ...]:
    """The runs of all that a member sends and receives, itself included. `ranks`: the global ranks
    of all members of the group. `joined` False: each piece is a run of its own."""
    single = [
        PieceRun(piece, (ranks[member],), None, tag, sent)
        for sent, by_member in ((False, moved.receives), (True, moved.sends))
        for member, pieces in enumerate(by_member)
        for tag, piece in enumerate(pieces)
    ]
    runs: list[PieceRun] = []
    for run in sorted(single, key=_place):
        longer = _join(runs[-1], run) if runs and joined else None
        if longer is None:
            runs.append(run)
        else:
            runs[-1] = longer
    return tuple(runs)


def _place(run: PieceRun) -> tuple[Any, ...]:
    piece = run.piece
    return run.sent, run.tag, piece.buffer, piece.start, piece.heads or ()


def _join(first: PieceRun, second: PieceRun) -> PieceRun | None:
    """None if they are no neighbours, or not of equal size."""
    a, b, count = first.piece, second.piece, len(first.ranks)
    if (first.sent, first.tag, a.buffer) != (second.sent, second.tag, b.buffer):
        return None
    apart: Literal["rows", "heads"] | None = None
    piece = a
    if (a.start, a.stop) == (b.start, b.stop) and a.heads and b.heads and a != b:
        width = b.heads[1] - b.heads[0]
        if a.heads[1] != b.heads[0] or a.heads[1] - a.heads[0] != count * width:
            return None
        apart, piece = "heads", replace(a, heads=(a.heads[0], b.heads[1]))
    elif a != b:
        rows = b.stop - b.start
        if a.heads != b.heads or a.stop != b.start or a.stop - a.start != count * rows:
            return None
        apart, piece = "rows", replace(a, stop=b.stop)
    if count > 1 and apart != first.apart:
        return None
    return PieceRun(piece, (*first.ranks, *second.ranks), apart, first.tag, first.sent)
