"""What the executor asks of a transport, and what all transports share.

Transports read every communication in one form, `Transfers`. `verify` keeps its own reading on
purpose: what proves a plan must not share the mistakes of what runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Communication,
    Move,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.language.traffic import Traffic
from mesh_attention.runtime.device import Marks

View = Callable[[Piece], Tensor]  # the rows of a piece, (rows, batch, heads, width)
Pieces = tuple[Piece, ...]


class Handle(Protocol):
    """A communication in flight."""

    ready: bool = True
    """False while `wait` could not return because other ranks of this process have yet to come;
    other processes make progress by themselves."""

    def wait(self) -> None:
        """Make what follows on the compute stream see the result."""
        ...


Start = Callable[[Marks], Handle]  # begins an operation once these marks are passed


class Transport(Protocol):
    in_order: bool  # operations follow each other without anybody waiting for the one before
    own_stream: bool  # they run on a CUDA stream that no computation is on, and follow marks
    shows_workspace: bool  # other ranks read this rank's, where the plan places its buffers

    def prepare(self, op: Communication, view: View) -> Start:
        """Do all of an operation of this rank that can be done before its tensors hold anything.

        The result is started once in every call for as long as the tensors stay the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transfers:
    """What one member of a group sends and receives, by the other member. What it sends to itself
    is copied.

    `sends[a][i]` of member b lands in `receives[b][i]` of member a. With `adds` all members send to
    the same places, and what arrives there is added up in the order of the members.
    """

    sends: tuple[Pieces, ...]
    receives: tuple[Pieces, ...]
    adds: bool = False


@lru_cache(maxsize=1024)
def transfers(op: Communication, size: int) -> Transfers:
    """The transfers of one member's operation, in a group of `size` members."""
    match op:
        case AllToAll():
            return Transfers(tuple(op.sends), tuple(op.receives))
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
    """Where a member's part lies in the whole: stretch by stretch, each stretch after the same
    stretch of lower members."""
    begin = 0
    for a, b in pairwise(move.cuts):
        yield _rows(move.whole, begin + member * (b - a), b - a)
        begin += size * (b - a)


def _rows(piece: Piece, start: int, num_rows: int) -> Piece:
    if num_rows == piece.num_rows:
        return piece
    first = piece.start + start
    return Piece(piece.buffer, first, first + num_rows, piece.heads)


Started = tuple[str, Traffic]  # the kind of an operation, and its bytes for a batch size of 1


@dataclass(frozen=True, eq=False)
class Counters:
    """Bytes handed to a transport, by kind of operation, counted as `plan/read/count.py` does.
    `starts`: how often each operation was started, times the batch size."""

    starts: dict[Started, int] = field(default_factory=lambda: defaultdict(int))

    def reset(self) -> None:
        self.starts.clear()

    @property
    def by_operation(self) -> dict[str, Traffic]:
        totals: dict[str, Traffic] = defaultdict(Traffic)
        for (kind, each), times in self.starts.items():
            sizes = (each.sent_bytes, each.received_bytes, each.token_bytes)
            totals[kind] += Traffic(*[size * times for size in sizes])
        return dict(totals)

    @property
    def total(self) -> Traffic:
        return sum(self.by_operation.values(), Traffic())
