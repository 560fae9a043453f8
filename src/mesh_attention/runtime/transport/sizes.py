"""Counting the bytes of the tensors that an operation hands to its transport."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.runtime.transport.interface import Counters, View

__all__ = ["count_into"]


def count_into(
    counters: Counters, op: Communication, member: int, num_members: int, view: View
) -> None:
    match op:
        case AllGather() | ReduceScatter():
            sizes = [view(move.part) for move in op.moves]
            others = num_members - 1
            moved = others * _bytes(sizes)
            counters.add(op, moved, moved)
        case AllToAll():
            sends = _views((p for m, ps in enumerate(op.sends) if m != member for p in ps), view)
            receives = _views(
                (p for m, ps in enumerate(op.receives) if m != member for p in ps), view
            )
            counters.add(op, _bytes(sends), _bytes(receives))
        case SendRecv():
            sends = _views(op.sends if op.to_member != member else (), view)
            receives = _views(op.receives if op.from_member != member else (), view)
            counters.add(op, _bytes(sends), _bytes(receives))


def _views(pieces: Iterable[Piece], view: View) -> list[Tensor]:
    return [view(piece) for piece in pieces]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
