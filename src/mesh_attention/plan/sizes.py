"""Bytes of many buffers, worked out once for each kind and for each set of rows."""

from __future__ import annotations

from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.problem import Problem

__all__ = ["BufferSizes"]


class BufferSizes:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Members of an enumeration are single objects, quicker to tell apart by id than by hash.
        self._rows: dict[tuple[int, int], tuple[int, bool]] = {}
        self._counts: dict[int, tuple[Spans, int]] = {}  # by id of the spans, which are held

    def row(self, buffer: Buffer) -> tuple[int, bool]:
        """Bytes of one row of one head, and whether it is a statistic."""
        key = (id(buffer.kind), id(buffer.precision))
        found = self._rows.get(key)
        if found is None:
            found = (buffer.row_bytes(self._problem), buffer.kind.is_statistic)
            self._rows[key] = found
        return found

    def num_bytes(self, buffer: Buffer) -> int:
        """Of the whole buffer."""
        known = self._counts.get(id(buffer.rows))
        if known is None:
            known = self._counts[id(buffer.rows)] = (buffer.rows, buffer.num_rows)
        first, last = buffer.heads
        return known[1] * (last - first) * self.row(buffer)[0]
