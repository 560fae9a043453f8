"""One rank without the others: communications move nothing, or whatever `receive` writes.

For measuring the computation of one rank of a large plan on one device.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.program import Communication, Program, writes
from mesh_attention.runtime.streams import Marks
from mesh_attention.runtime.transport.interface import Handle, Start, View

__all__ = ["AloneTransport"]


class AloneTransport:
    in_order = True
    own_stream = True

    def __init__(
        self, program: Program, receive: Callable[[Buffer, Tensor], None] | None = None
    ) -> None:
        self._table = program.buffer_table()
        self._receive = receive

    def prepare(self, op: Communication, view: View) -> Start:
        landed = [(self._table[piece.buffer], view(piece)) for piece in writes(op)]

        def start(after: Marks) -> Handle:
            if self._receive is not None:
                for buffer, tensor in landed:
                    self._receive(buffer, tensor)
            return _Done()

        return start


class _Done:
    def ready(self) -> bool:
        return True

    def wait(self) -> None: ...
