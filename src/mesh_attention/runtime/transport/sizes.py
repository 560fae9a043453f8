"""Counting the bytes of the tensors that an operation hands to its transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.traffic import Traffic
from mesh_attention.runtime.streams import Marks
from mesh_attention.runtime.transport.interface import Counters, Handle, Start, View

__all__ = ["Counted", "Meter"]


class Meter:
    """Adds up what one rank hands over; `table` tells statistics from tokens."""

    def __init__(self, table: Mapping[str, Buffer]) -> None:
        self._table = table
        self.counters = Counters()

    def count(self, op: Communication, member: int, num_members: int, view: View) -> None:
        self.counters.add(op, self.measure(op, member, num_members, view))

    def measure(self, op: Communication, member: int, num_members: int, view: View) -> Traffic:
        match op:
            case AllGather() | ReduceScatter():
                moved, tokens = self._sizes((move.part for move in op.moves), view)
                others = num_members - 1
                return Traffic(others * moved, others * moved, others * tokens)
            case AllToAll():
                return self._pieces(
                    (p for m, pieces in enumerate(op.sends) if m != member for p in pieces),
                    (p for m, pieces in enumerate(op.receives) if m != member for p in pieces),
                    view,
                )
            case SendRecv():
                return self._pieces(
                    op.sends if op.to_member != member else (),
                    op.receives if op.from_member != member else (),
                    view,
                )

    def _pieces(self, sends: Iterable[Piece], receives: Iterable[Piece], view: View) -> Traffic:
        return Traffic(self._sizes(sends, view)[0], *self._sizes(receives, view))

    def _sizes(self, pieces: Iterable[Piece], view: View) -> tuple[int, int]:
        """Bytes of the tensors behind these pieces: all, and those of tokens."""
        everything = tokens = 0
        for piece in pieces:
            tensor = view(piece)
            size = tensor.numel() * tensor.element_size()
            everything += size
            tokens += 0 if self._table[piece.buffer].kind.is_statistic else size
        return everything, tokens


class Counted:
    """A prepared operation whose bytes are added up each time it is started."""

    def __init__(self, start: Start, meter: Meter, op: Communication, traffic: Traffic) -> None:
        self._start, self._meter, self._op, self._traffic = start, meter, op, traffic

    def __call__(self, after: Marks) -> Handle:
        self._meter.counters.add(self._op, self._traffic)
        return self._start(after)
