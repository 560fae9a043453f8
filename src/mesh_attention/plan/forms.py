"""Programs whose buffers are alike in all but the places of their rows have one form.

All ranks of a ring have the same one, and it would take long to measure each of them anew.
"""

from __future__ import annotations

from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.program import Program

__all__ = ["FormKey", "FormKeys"]

FormKey = tuple[tuple[object, ...], ...]


class FormKeys:
    """The programs that are asked about must stay alive as long as this."""

    def __init__(self) -> None:
        self._num_rows: dict[int, int] = {}  # by id of the spans

    def of(self, program: Program) -> FormKey:
        # Members of an enumeration are single objects, quicker to tell apart by id than by hash.
        return tuple(
            (b.name, id(b.kind), id(b.precision), id(b.role), b.heads, self._rows_of(b))
            for b in program.buffers
        )

    def _rows_of(self, buffer: Buffer) -> int:
        found = self._num_rows.get(id(buffer.rows))
        if found is None:
            found = self._num_rows[id(buffer.rows)] = buffer.num_rows
        return found
