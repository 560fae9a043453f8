"""The copies of one operation over shared memory, in the order in which signals allow them.

Rows in one stretch are copied as they are, which copy engines can do; what must be spread over
heads or added up lands in memory of ours first, so that no kernel reads across the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mesh_attention.plan.buffers import Precision
from mesh_attention.runtime.transport.interface import View
from mesh_attention.runtime.transport.pulls import Pull, Rows, Steps
from mesh_attention.runtime.transport.regions import Region

__all__ = ["Copies", "Dtypes"]

Dtypes = Mapping[Precision, torch.dtype]


class Copies:
    """`staging_offset`: where in every block the place for staged pieces begins, in bytes."""

    def __init__(self, steps: Steps, view: View, dtypes: Dtypes, staging_offset: int) -> None:
        self._steps = steps
        self._view = view
        self._dtypes = dtypes
        self._staging_offset = staging_offset
        self._totals: dict[Rows, Tensor] = {}

    def show(self, own_block: Tensor) -> None:
        """Make what others read readable in our block."""
        for piece, region in self._steps.staged:
            self._at(region, own_block).copy_(self._view(piece))

    def keep(self) -> None:
        """What stays here."""
        for own in self._steps.own:
            source, target = self._rows(own.source), self._rows(own.target)
            if not self._steps.adds:
                target.copy_(source)
                continue
            wide = torch.promote_types(target.dtype, torch.float32)
            if wide == target.dtype:
                self._totals[own.target] = target.copy_(source)
            else:  # rounded once, at the end
                self._totals[own.target] = source.to(wide, copy=True)

    def fetch(self, pulls: Sequence[Pull], block: Tensor) -> None:
        """What one other member shows us in its block."""
        for pull in pulls:
            source = self._at(pull.source, block)
            if self._steps.adds:
                self._totals[pull.target] += torch.empty_like(source).copy_(source)
                continue
            target = self._rows(pull.target)
            if not target.is_contiguous():
                source = torch.empty_like(source).copy_(source)
            target.copy_(source)

    def finish(self) -> None:
        for rows, total in self._totals.items():
            target = self._rows(rows)
            if total.data_ptr() != target.data_ptr():
                target.copy_(total)

    def _rows(self, rows: Rows) -> Tensor:
        return self._view(rows.piece)[rows.start : rows.stop]

    def _at(self, region: Region, block: Tensor) -> Tensor:
        start = region.offset + (self._staging_offset if region.staged else 0)
        flat = block[start : start + region.num_bytes].view(self._dtypes[region.precision])
        return flat.view(region.shape)
