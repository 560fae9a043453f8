"""Programs that are alike: they use buffers of the same sizes in the same way.

What follows from that alone (where buffers lie, who waits for whom) is worked out once for all of
them, whatever their members, tokens and calls are.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import (
    Attention,
    CallKind,
    Free,
    Operation,
    Program,
    reads,
    writes,
)


class Alike:
    """Numbers for programs of one pass, equal for those that are alike."""

    def __init__(self) -> None:
        # By identity: ranks share most of them, and the hash of others would be used once. They
        # are kept, so that no other takes their place.
        self._by_buffer: dict[int, tuple[Buffer, int]] = {}
        self._by_op: dict[int, tuple[Operation, int]] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self._tables: dict[tuple[int, ...], int] = {}
        self._uses: dict[object, int] = {}

    def table(self, program: Program) -> int:
        """By the buffers: their names and sizes."""
        numbers = []
        for b in program.buffers:
            known = self._by_buffer.get(id(b))
            if known is None:
                key = (b.name, b.kind, b.precision, b.role, b.num_heads, b.num_rows, b.offset)
                known = b, self._shapes.setdefault(key, len(self._shapes))
                self._by_buffer[id(b)] = known
            numbers.append(known[1])
        return self._tables.setdefault(tuple(numbers), len(self._tables))

    def uses(self, program: Program) -> tuple[int, tuple[int, ...]]:
        """By the buffers, and by the tasks and pieces of the operations."""
        return self.table(program), tuple(map(self._use, program.operations))

    def _use(self, op: Operation) -> int:
        known = self._by_op.get(id(op))
        if known is None:
            pieces = (op.buffers,) if isinstance(op, Free) else (reads(op), writes(op))
            whole = isinstance(op, Attention) and is_one_call(op)
            key = (op.task, type(op), whole, *pieces)
            known = self._by_op[id(op)] = op, self._uses.setdefault(key, len(self._uses))
        return known[1]


def attention_key(op: Attention, table: Mapping[str, Buffer]) -> tuple[object, ...]:
    """Equal for attentions that take as long: by tokens only where calls go by row ranges."""
    q, k = table[op.q.buffer], table[op.k.buffer]
    if any(call.kind is CallKind.RANGE for call in op.calls):
        return op, q, k
    return op, q.num_heads, k.num_heads


def is_one_call(op: Attention) -> bool:
    """For all rows of both sides."""
    if len(op.calls) != 1:
        return False
    (call,) = op.calls
    rows = call.q_start, call.q_stop, call.k_start, call.k_stop
    return rows == (0, op.q.num_rows, 0, op.k.num_rows)
