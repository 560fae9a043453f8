"""Where a rank's block of shared memory shows what others read.

The block holds the workspace and, behind it, a place for what is not in the workspace: the caller's
tensors, and pieces of some heads only, which do not lie in one stretch. Those are copied there
before others read them ("staged"). Everything follows from the plan, so no rank has to be told
where another keeps its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mesh_attention.plan.buffers import Piece, Precision, Role
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Communication,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.workspace import ALIGNMENT_BYTES, workspace_map

__all__ = ["Owner", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """Rows that lie in one stretch of a block; `offset` counts bytes of its part of the block."""

    staged: bool
    offset: int
    num_rows: int
    row_shape: tuple[int, int, int]  # batch, heads, width
    row_bytes: int
    precision: Precision

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.num_rows, *self.row_shape)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def rows(self, start: int, stop: int) -> Region:
        offset = self.offset + start * self.row_bytes
        return replace(self, offset=offset, num_rows=stop - start)


class Owner:
    """One rank's program of a pass, seen by those who read from it."""

    def __init__(self, plan: Plan, one: Pass, rank: int, batch: int) -> None:
        program = one.programs[rank]
        self.rank = rank
        self._plan = plan
        self._groups = one.groups
        self._batch = batch
        self._table = program.buffer_table()
        self._memory = workspace_map(program, plan.problem)
        self._operations: dict[tuple[str, str], Communication] = {}
        for op in program.operations:
            if is_communication(op):
                assert isinstance(op, Communication)
                assert (op.group, op.name) not in self._operations, op
                self._operations[op.group, op.name] = op

    def operation(self, like: Communication) -> Communication:
        """Our side of an operation that another member holds."""
        return self._operations[like.group, like.name]

    @property
    def workspace_bytes(self) -> int:
        return self._memory.total_bytes * self._batch

    @property
    def staging_bytes(self) -> int:
        """Operations follow each other on one stream, so each may use the same place."""
        return max((self._staged_bytes(op) for op in self._operations.values()), default=0)

    def regions(self, op: Communication) -> dict[Piece, Region]:
        """Of everything that other members read in this operation of ours."""
        found: dict[Piece, Region] = {}
        taken = 0
        for piece in _read_by_others(op, self._groups[op.group].index(self.rank)):
            if piece in found:
                continue
            region = self._region(piece, taken)
            found[piece] = region
            if region.staged:
                taken += -(-region.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return found

    def _staged_bytes(self, op: Communication) -> int:
        staged = [region for region in self.regions(op).values() if region.staged]
        return max((region.offset + region.num_bytes for region in staged), default=0)

    def _region(self, piece: Piece, staged_offset: int) -> Region:
        buffer = self._table[piece.buffer]
        problem = self._plan.problem
        heads = piece.num_heads(buffer)
        row_bytes = self._batch * heads * buffer.row_bytes(problem)
        direct = buffer.role is Role.WORKSPACE and heads == buffer.num_heads
        offset = staged_offset
        if direct:
            offset = self._memory.offsets[piece.buffer] * self._batch + piece.start * row_bytes
        width = buffer.kind.width(problem)
        shape = (self._batch, heads, width)
        return Region(not direct, offset, piece.num_rows, shape, row_bytes, buffer.precision)


def _read_by_others(op: Communication, member: int) -> Iterator[Piece]:
    match op:
        case AllGather():
            yield from (move.part for move in op.moves)
        case ReduceScatter():
            yield from (move.whole for move in op.moves)
        case AllToAll():
            for to, pieces in enumerate(op.sends):
                if to != member:
                    yield from pieces
        case SendRecv():
            if op.to_member != member:
                yield from op.sends
