"""Where a rank's block of shared memory shows what others read.

The block holds the workspace and, behind it, a place for what is not in the workspace: the caller's
tensors, and pieces of some heads only, which do not lie in one stretch. Those are copied there
before others read them ("staged"). Everything follows from the plan, so no rank has to be told
where another keeps its data.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.language.buffers import Piece, Precision, Role
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.workspace import ALIGNMENT_BYTES, workspace_map
from mesh_attention.runtime.transport.transfers import Transfers, transfers


@dataclass(frozen=True, slots=True)
class Region:
    """Rows that lie in one stretch of a block; `offset` counts bytes of its part of the block."""

    staged: bool
    offset: int
    shape: tuple[int, int, int, int]  # rows, batch, heads, width
    num_bytes: int
    precision: Precision


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
        self._moved: dict[tuple[str, str], Transfers] = {}
        for op in program.operations:
            if isinstance(op, Communication):
                assert (op.group, op.name) not in self._moved, op
                self._moved[op.group, op.name] = transfers(op, len(one.groups[op.group]))

    def transfers(self, like: Communication) -> Transfers:
        """Our side of an operation that another member holds."""
        return self._moved[like.group, like.name]

    @property
    def workspace_bytes(self) -> int:
        return self._memory.total_bytes * self._batch

    @property
    def staging_bytes(self) -> int:
        """Operations follow each other on one stream, so each may use the same place."""
        regions = (one for key in self._moved for one in self._regions(*key).values())
        return max((one.offset + one.num_bytes for one in regions if one.staged), default=0)

    def regions(self, op: Communication) -> dict[Piece, Region]:
        """Of everything that other members read in this operation."""
        return self._regions(op.group, op.name)

    def _regions(self, group: str, name: str) -> dict[Piece, Region]:
        member = self._groups[group].index(self.rank)
        found: dict[Piece, Region] = {}
        taken = 0
        for to, pieces in enumerate(self._moved[group, name].sends):
            for piece in pieces if to != member else ():
                if piece in found:
                    continue
                region = found[piece] = self._region(piece, taken)
                if region.staged:
                    taken += -(-region.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return found

    def _region(self, piece: Piece, staged_offset: int) -> Region:
        buffer = self._table[piece.buffer]
        problem = self._plan.problem
        heads = piece.num_heads(buffer)
        row_bytes = self._batch * heads * buffer.row_bytes(problem)
        direct = buffer.role is Role.WORKSPACE and heads == buffer.num_heads
        offset = staged_offset
        if direct:
            offset = self._memory.offsets[piece.buffer] * self._batch + piece.start * row_bytes
        shape = (piece.num_rows, self._batch, heads, buffer.kind.width(problem))
        return Region(not direct, offset, shape, piece.num_rows * row_bytes, buffer.precision)
