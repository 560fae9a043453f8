"""Where the results of kernel calls go: into accumulators, stored by the first, added by the rest.

All views are made once; a call's result is cut only if some of its rows are fresh and some are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.kernels import RowKernels
from mesh_attention.runtime.binding import cut
from mesh_attention.runtime.coverage import Stretch

__all__ = ["MergedRows", "SummedRows", "clear"]


class MergedRows:
    """The rows of (out_BSHE, lse_BHS) that one call's partial result is merged into."""

    def __init__(
        self, kernels: RowKernels, out: Tensor, lse: Tensor, stretches: Sequence[Stretch]
    ) -> None:
        self._kernels = kernels
        start = stretches[0].start if stretches else 0
        self._parts = [
            (
                cut(out, 1, s.start, s.stop),
                cut(lse, 2, s.start, s.stop),
                None if len(stretches) == 1 else slice(s.start - start, s.stop - start),
                s.fresh,
            )
            for s in stretches
        ]

    def take(self, out: Tensor, lse: Tensor) -> None:
        merge = self._kernels.merge_into
        for acc_out, acc_lse, rows, fresh in self._parts:
            if rows is None:
                merge(acc_out, acc_lse, out, lse, fresh=fresh)
            else:
                merge(acc_out, acc_lse, out[:, rows], lse[:, :, rows], fresh=fresh)


class SummedRows:
    """The rows of a gradient (B, S, H, D) that one call's gradient is added to."""

    def __init__(self, kernels: RowKernels, total: Tensor, stretches: Sequence[Stretch]) -> None:
        self._kernels = kernels
        start = stretches[0].start if stretches else 0
        self._parts = [
            (
                cut(total, 1, s.start, s.stop),
                None if len(stretches) == 1 else slice(s.start - start, s.stop - start),
                s.fresh,
            )
            for s in stretches
        ]

    def take(self, grad: Tensor) -> None:
        for total, rows, fresh in self._parts:
            part = grad if rows is None else grad[:, rows]
            self._kernels.sum((part,) if fresh else (total, part), total)


def clear(out: Tensor, lse: Tensor | None = None) -> None:
    """What rows that no call touches hold."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
