"""What the executor asks of a transport, and how transports count what they are handed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from mesh_attention.plan.language.buffers import Buffer, Piece
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.traffic import Traffic
from mesh_attention.runtime.device.streams import Marks
from mesh_attention.runtime.transport.transfers import Pieces, Transfers

View = Callable[[Piece], Tensor]  # the rows of a piece, (rows, batch, heads, width)


class Handle(Protocol):
    """A communication in flight."""

    def ready(self) -> bool:
        """False while `wait` could not return because others have yet to come (in one process);
        other processes make progress by themselves."""
        return True

    def wait(self) -> None:
        """Make what follows on the compute stream see the result."""
        ...


Start = Callable[[Marks], Handle]  # begins an operation once these marks are passed


class Transport(Protocol):
    @property
    def in_order(self) -> bool:
        """Whether operations follow each other without anybody waiting for the one before."""
        ...

    @property
    def own_stream(self) -> bool:
        """Whether operations run on a CUDA stream that no computation is on, and follow marks."""
        ...

    @property
    def shows_workspace(self) -> bool:
        """Whether other ranks read this rank's workspace, where the plan places its buffers."""
        ...

    def prepare(self, op: Communication, view: View) -> Start:
        """All of an operation of this rank that can be done before its tensors hold anything.

        What is returned is started once in every call for as long as the tensors stay the same.
        """
        ...


class Counters:
    """Bytes really handed to a transport, by kind of operation, as `plan.count` counts them."""

    def __init__(self) -> None:
        self.by_operation: dict[str, Traffic] = defaultdict(Traffic)

    def add(self, op: Communication, traffic: Traffic) -> None:
        self.by_operation[type(op).__name__] += traffic

    def reset(self) -> None:
        self.by_operation.clear()

    @property
    def total(self) -> Traffic:
        return sum(self.by_operation.values(), Traffic())


class Meter:
    """Measures the tensors of each operation of a program once, and adds them up at every start."""

    def __init__(self, table: Mapping[str, Buffer]) -> None:
        self._table = table
        self._known: dict[tuple[str, str], Traffic] = {}
        self.counters = Counters()

    def measure(self, op: Communication, moved: Transfers, member: int, view: View) -> Traffic:
        """What `member` sends to others and receives from them."""
        key = (op.group, op.name)
        if key not in self._known:
            sent, _ = self._sizes(moved.sends, member, view)
            self._known[key] = Traffic(sent, *self._sizes(moved.receives, member, view))
        return self._known[key]

    def counted(self, start: Start, op: Communication, traffic: Traffic) -> Start:
        def counted_start(after: Marks) -> Handle:
            self.counters.add(op, traffic)
            return start(after)

        return counted_start

    def _sizes(self, by_member: tuple[Pieces, ...], member: int, view: View) -> tuple[int, int]:
        """Bytes of the tensors to or from the others: all, and those of tokens."""
        everything = tokens = 0
        rows: dict[tuple[str, object], int] = {}  # bytes of one, by buffer and heads
        for piece in (p for m, pieces in enumerate(by_member) if m != member for p in pieces):
            if piece.num_rows == 0:
                continue
            key = (piece.buffer, piece.heads)
            if key not in rows:
                row = view(piece)[0]
                rows[key] = row.numel() * row.element_size()
            size = piece.num_rows * rows[key]
            everything += size
            tokens += 0 if self._table[piece.buffer].kind.is_statistic else size
        return everything, tokens
