"""A transport that keeps time in place of a network.

Every communication begins after its marks, on a stream of its own, and what it would receive is
written into its target pieces. How it keeps time is the holder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import Communication, Program, writes
from mesh_attention.runtime.transport.interface import Start, View

Landing = tuple[Buffer, Tensor]  # where a message lands: (rows, batch, heads, width)


class Holder(Protocol):
    def prepare(self, landings: Sequence[Landing], seconds: float) -> Start:
        """Something that lasts so long on the communication stream and fills these tensors."""
        ...


class ReplayTransport:
    in_order = True
    own_stream = True
    shows_workspace = False

    def __init__(self, program: Program, seconds: Sequence[float], holder: Holder) -> None:
        self._seconds = dict(zip(program.operations, seconds, strict=True))
        self._table = program.buffer_table()
        self._holder = holder

    def prepare(self, op: Communication, view: View) -> Start:
        landings = [(self._table[piece.buffer], view(piece)) for piece in writes(op)]
        return self._holder.prepare(landings, self._seconds[op])
