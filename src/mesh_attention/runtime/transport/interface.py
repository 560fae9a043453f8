"""What the executor asks of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import Communication
from mesh_attention.plan.traffic import Traffic
from mesh_attention.runtime.streams import Marks

__all__ = ["Counters", "Handle", "Start", "Transport", "UnpreparedTransport", "View"]

View = Callable[[Piece], Tensor]  # the rows of a piece, (rows, batch, heads, width)


class Handle(Protocol):
    """A communication under way."""

    def ready(self) -> bool:
        """False while `wait` could not return because others have yet to come (in one process)."""
        ...

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

    def prepare(self, op: Communication, view: View) -> Start:
        """All of an operation of this rank that can be done before its tensors hold anything.

        What is returned is started once in every call for as long as the tensors stay the same.
        """
        ...


class UnpreparedTransport(ABC):
    """For transports that have nothing to prepare."""

    in_order = False
    own_stream = False

    @abstractmethod
    def start(self, op: Communication, view: View, after: Marks) -> Handle:
        """Begin an operation of this rank. `after` marks the computation it must follow."""

    def prepare(self, op: Communication, view: View) -> Start:
        return partial(self.start, op, view)


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
