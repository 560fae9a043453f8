"""A communication as one member carries it out over shared memory: it takes, and never gives.

Every member shows its data and fetches what it needs from the others' blocks, so all that is left
of an operation is a list of copies; a reduce-scatter adds up what the copies bring. Rows in one
stretch are copied as they are, which copy engines can do; what must be spread over heads or added
up lands in memory of ours first, so that no kernel reads across the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece, Precision
from mesh_attention.plan.language.program import Communication
from mesh_attention.runtime.transport.interface import View
from mesh_attention.runtime.transport.regions import Owner, Region
from mesh_attention.runtime.transport.transfers import transfers

Dtypes = Mapping[Precision, torch.dtype]
Pull = tuple[Region, Piece]  # from another's block, to a piece of ours


@dataclass(frozen=True, slots=True)
class Steps:
    """`readers` and the members of `pulls` are places in the group of the operation."""

    staged: tuple[tuple[Piece, Region], ...]
    readers: tuple[int, ...]
    pulls: tuple[tuple[int, tuple[Pull, ...]], ...]
    own: tuple[tuple[Piece, Piece], ...]  # what stays here; a reduce-scatter begins its sums so
    adds: bool


def steps_of(op: Communication, member: int, size: int, owners: Mapping[int, Owner]) -> Steps:
    """`member` is one of `size`; `owners`, by place in the group: it and all that it reads from.

    `op` may be one half of the member's operation, what it sends or what it receives.
    """
    moved = transfers(op, size)
    # Each begins with its neighbour, so that no member is asked by all the others at once.
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
    """The copies of one operation, in the order in which signals allow them.

    `staging_offset`: where in every block the place for staged pieces begins, in bytes.
    """

    def __init__(self, steps: Steps, view: View, dtypes: Dtypes, staging_offset: int) -> None:
        self._steps = steps
        self._view = view
        self._dtypes = dtypes
        self._staging_offset = staging_offset
        self._totals: dict[Piece, Tensor] = {}

    def show(self, own_block: Tensor) -> None:
        """Make what others read readable in our block."""
        for piece, region in self._steps.staged:
            self._at(region, own_block).copy_(self._view(piece))

    def keep(self) -> None:
        """What stays here."""
        for kept, place in self._steps.own:
            source, target = self._view(kept), self._view(place)
            if not self._steps.adds:
                target.copy_(source)
                continue
            wide = torch.promote_types(target.dtype, torch.float32)
            if wide == target.dtype:
                self._totals[place] = target.copy_(source)
            else:  # rounded once, at the end
                self._totals[place] = source.to(wide, copy=True)

    def fetch(self, pulls: Sequence[Pull], block: Tensor) -> None:
        """What one other member shows us in its block."""
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
        for place, total in self._totals.items():
            target = self._view(place)
            if total.data_ptr() != target.data_ptr():
                target.copy_(total)

    def _at(self, region: Region, block: Tensor) -> Tensor:
        start = region.offset + (self._staging_offset if region.staged else 0)
        flat = block[start : start + region.num_bytes].view(self._dtypes[region.precision])
        return flat.view(region.shape)
