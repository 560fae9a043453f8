"""A communication over shared memory: where each rank's data lies, and the copies that move it.

Every member shows its data and fetches rows from the others' blocks. Rows in one stretch are copied
as they are, by copy engines. Rows that are spread over heads or added up are copied to this rank's
own memory first, so that no kernel reads across the link.

Behind the workspace a block has a staging area: the caller's tensors, and pieces of some of a
buffer's heads, are copied there before others read them. All offsets follow from the plan, so ranks
need not send them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece, Precision, Role
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.workspace import ALIGNMENT_BYTES, workspace_map
from mesh_attention.runtime.transport.interface import Transfers, View, transfers

Dtypes = Mapping[Precision, torch.dtype]


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous rows of a block of memory. `offset`: bytes from the begin of the workspace or, if
    `staged`, of the staging area."""

    staged: bool
    offset: int
    shape: tuple[int, int, int, int]  # rows, batch, heads, width
    num_bytes: int
    precision: Precision


Pull = tuple[Region, Piece]  # from another rank's block, to a piece of this rank


class Owner:
    """The data that one rank shows to the ranks that read from it, by its program of a pass."""

    def __init__(self, plan: Plan, pass_: Pass, rank: int, batch: int) -> None:
        program = pass_.programs[rank]
        self.rank = rank
        self._plan = plan
        self._groups = pass_.groups
        self._batch = batch
        self._table = program.buffer_table()
        self._memory = workspace_map(program, plan.problem)
        self._communications: dict[tuple[str, str], Communication] = {}
        for op in program.operations:
            if isinstance(op, Communication):
                assert (op.group, op.name) not in self._communications, op
                self._communications[op.group, op.name] = op

    def transfers(self, like: Communication) -> Transfers:
        """This rank's part in the same operation as `like`, which is another member's part, or half
        of this rank's."""
        op = self._communications[like.group, like.name]
        return transfers(op, len(self._groups[op.group]))

    @property
    def workspace_bytes(self) -> int:
        return self._memory.total_bytes * self._batch

    @property
    def staging_bytes(self) -> int:
        """Operations follow each other on one stream, so all use the same staging area."""
        every = self._communications.values()
        regions = (region for op in every for region in self.regions(op).values())
        return max((r.offset + r.num_bytes for r in regions if r.staged), default=0)

    def regions(self, op: Communication) -> dict[Piece, Region]:
        """The regions of all pieces that other members read in this operation."""
        member = self._groups[op.group].index(self.rank)
        regions: dict[Piece, Region] = {}
        taken = 0
        for to, pieces in enumerate(self.transfers(op).sends):
            for piece in pieces if to != member else ():
                if piece in regions:
                    continue
                region = regions[piece] = self._region(piece, taken)
                if region.staged:
                    taken += -(-region.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return regions

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


@dataclass(frozen=True, slots=True)
class Steps:
    """What one member does in an operation. Members are places in the group of the operation."""

    staged: tuple[tuple[Piece, Region], ...]  # pieces to copy before others read them
    readers: tuple[int, ...]  # members that read from this one
    pulls: tuple[tuple[int, tuple[Pull, ...]], ...]  # what to fetch, by the member that shows it
    own: tuple[tuple[Piece, Piece], ...]  # pieces that stay on this rank, from and to
    adds: bool  # what is fetched is added up


def steps_of(op: Communication, member: int, size: int, owners: Mapping[int, Owner]) -> Steps:
    """`member` is a place in a group of `size`; `owners` has it and all members that it reads from.
    `op` is the member's operation, or the half of it that sends or receives."""
    moved = transfers(op, size)
    # Each member begins with its neighbour, so that not all read from the same member at once.
    others = [(member + step) % size for step in range(1, size)]
    readers = tuple(sorted(other for other in others if moved.sends[other]))
    shown = owners[member].regions(op) if readers else {}
    pulls = []
    for other in others:
        if other in owners and moved.receives[other]:
            regions, theirs = owners[other].regions(op), owners[other].transfers(op)
            sent, places = theirs.sends[member], moved.receives[other]
            pulls.append((other, tuple((regions[a], b) for a, b in zip(sent, places, strict=True))))
    return Steps(
        staged=tuple((piece, region) for piece, region in shown.items() if region.staged),
        readers=readers,
        pulls=tuple(pulls),
        own=tuple(zip(moved.sends[member], moved.receives[member], strict=True)),
        adds=moved.adds,
    )


class Copies:
    """The copies of one operation. The transport calls `show`, `keep`, `fetch` and `finish`, and
    waits for signals in between. `staging_offset`: bytes of a block before its staging area."""

    def __init__(self, steps: Steps, view: View, dtypes: Dtypes, staging_offset: int) -> None:
        self._steps = steps
        self._view = view
        self._dtypes = dtypes
        self._staging_offset = staging_offset
        self._totals: dict[Piece, Tensor] = {}

    def show(self, own_block: Tensor) -> None:
        """Copy the pieces that others cannot read in place to the staging area."""
        for piece, region in self._steps.staged:
            self._at(region, own_block).copy_(self._view(piece))

    def keep(self) -> None:
        """Copy the pieces that stay on this rank, or begin sums with them."""
        for source_piece, place in self._steps.own:
            source, target = self._view(source_piece), self._view(place)
            if not self._steps.adds:
                target.copy_(source)
                continue
            wide = torch.promote_types(target.dtype, torch.float32)
            if wide == target.dtype:
                self._totals[place] = target.copy_(source)
            else:  # rounded once, at the end
                self._totals[place] = source.to(wide, copy=True)

    def fetch(self, pulls: Sequence[Pull], block: Tensor) -> None:
        """Copy, or add, the pieces that another member shows in its block."""
        for region, place in pulls:
            source = self._at(region, block)
            if self._steps.adds:
                self._totals[place] += torch.empty_like(source).copy_(source)
                continue
            target = self._view(place)
            if not target.is_contiguous():
                source = torch.empty_like(source).copy_(source)
            target.copy_(source)

    def finish(self) -> None:
        """Write sums to their places."""
        for place, total in self._totals.items():
            target = self._view(place)
            if total.data_ptr() != target.data_ptr():
                target.copy_(total)

    def _at(self, region: Region, block: Tensor) -> Tensor:
        start = region.offset + (self._staging_offset if region.staged else 0)
        flat = block[start : start + region.num_bytes].view(self._dtypes[region.precision])
        return flat.view(region.shape)
