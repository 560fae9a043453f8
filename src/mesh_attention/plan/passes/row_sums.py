"""A backward attention takes `out` where nobody else needs the sums of its rows.

Where queries travel, `delta = rowsum(out * grad_out)` travels in place of `out`. Rows that stay,
and that one backward attention reads, need it neither made nor kept: kernels that want `out` have
it, those that want sums make them, and cuDNN Frontend's makes them on the way.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from mesh_attention.plan.language.buffers import Piece, Role
from mesh_attention.plan.language.program import (
    AttendBackward,
    Free,
    Merge,
    MergeRule,
    Operation,
    Program,
)


def without_row_sums(program: Program) -> Program:
    """Attentions take `out` in place of delta where delta is made of the caller's own, and no row
    of it is read twice. Its buffer stays, unused: others may know where buffers lie."""
    table = program.buffer_table()
    operations: list[Operation | None] = list(program.operations)
    for at, op in enumerate(program.operations):
        if not isinstance(op, Merge) or op.rule is not MergeRule.DELTA:
            continue
        (out, _), (delta,) = op.inputs, op.outputs
        own = table[out.buffer].role is Role.INPUT and replace(delta, buffer=out.buffer) == out
        readers = _readers(program, at, delta.buffer) if own else {}
        pieces = [piece for _, piece in readers.values()]
        if not any(a.overlaps(b) for a, b in combinations(pieces, 2)):
            for i, (reader, piece) in readers.items():
                operations[i] = replace(reader, out=replace(piece, buffer=out.buffer), delta=None)
                operations[at] = None
    if None not in operations:
        return program
    return replace(program, operations=tuple(op for op in operations if op is not None))


def _readers(program: Program, writer: int, buffer: str) -> dict[int, tuple[AttendBackward, Piece]]:
    """Attentions with what they read of it as delta, by their places; none if others use it too."""
    found: dict[int, tuple[AttendBackward, Piece]] = {}
    for at, op in enumerate(program.operations):
        if at == writer or isinstance(op, Free) or buffer not in op.touched:
            continue
        if not isinstance(op, AttendBackward) or op.delta is None:
            return {}
        found[at] = op, op.delta
    return found
