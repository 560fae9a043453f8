"""What the executor asks of a transport."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import Communication
from mesh_attention.plan.traffic import Traffic

__all__ = ["Counters", "Handle", "Transport", "View"]

View = Callable[[Piece], Tensor]  # the rows of a piece, (rows, batch, heads, width)


class Handle(Protocol):
    """A communication under way."""

    def ready(self) -> bool:
        """False while `wait` could not return because others have yet to come (in one process)."""
        ...

    def wait(self) -> None:
        """Make what follows on the compute lane see the result."""
        ...


class Transport(Protocol):
    def start(self, op: Communication, view: View, after: object) -> Handle:
        """Begin an operation of this rank. `after` marks the computation it must follow."""
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
