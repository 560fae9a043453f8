"""`FusedRows`: the methods of `RowKernels` by a Triton kernel each, on strided views.

No temporaries are made. `kernels/registry.py` chooses it on CUDA; `kernels/rows.py` says what its
methods compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from mesh_attention.kernels.fused import row_kernels as kernels
from mesh_attention.kernels.rows import UNSEEN_LSE, RowKernels

# Loose parts lie anywhere in memory. A kernel is unrolled over them, so there must be few.
_MOST_LOOSE = 32
# 2,048 elements for 128 threads: two 16-byte loads of bf16 or four of fp32 in flight for each.
_BLOCK_ELEMENTS = 2048
_BLOCK_STATISTICS = 1024  # of (B, H, S) statistics: a row is a single number


class FusedRows(RowKernels):
    """Tensors that no kernel takes are left to the methods of `RowKernels`."""

    name = "fused"

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        _launch(kernels.merge_into_kernel, (acc_out, acc_lse, out, lse), FRESH=fresh)

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        firsts = (outs[0], lses[0], out, lse)
        part_step, lse_step = _equal_steps(outs), _equal_steps(lses)
        if part_step is not None and lse_step is not None:
            _launch(kernels.merge_all_kernel, firsts, len(outs), part_step, lse_step, LOOSE=0)
        elif len(outs) <= _MOST_LOOSE and _same_strides(outs) and _same_strides(lses):
            parts = (tuple(outs), tuple(lses), out, lse)
            _launch(kernels.merge_all_kernel, parts, 0, 0, 0, strided=firsts, LOOSE=len(outs))
        else:
            super().merge_all(outs, lses, out, lse)

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        step = _equal_steps(parts)
        if step is None:  # rare: plans place these parts at equal distances
            super().merge_lse(parts, target)
        else:
            _launch(kernels.merge_lse_kernel, (parts[0], target), len(parts), step)

    def rescale(self, out: Tensor, partial_lse: Tensor, global_lse: Tensor, target: Tensor) -> None:
        _launch(kernels.rescale_kernel, (out, partial_lse, global_lse, target))

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        step = _equal_steps(parts)
        if len(parts) > 2 and step is not None:
            _launch(kernels.sum_kernel, (parts[0], target), len(parts), step, LOOSE=0)
        elif len(parts) <= _MOST_LOOSE:
            copies, strided = (tuple(parts), target), (*parts, target)
            _launch(kernels.sum_kernel, copies, 0, 0, strided=strided, LOOSE=len(parts))
        else:
            super().sum(parts, target)

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None:
        _launch(kernels.delta_kernel, (out, grad_out, target))

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        target = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
        limit = torch.finfo(grad_out.dtype).max
        _launch(kernels.stand_in_kernel, (grad_out, delta, target), LIMIT=limit)
        return target

    def finite_lse(self, lse: Tensor) -> Tensor:
        target = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        _launch(kernels.finite_lse_kernel, (lse, target), UNSEEN=UNSEEN_LSE)
        return target


def _same_strides(tensors: Sequence[Tensor]) -> bool:
    return all(x.stride() == tensors[0].stride() for x in tensors)


def _launch(
    kernel: Any,
    tensors: tuple[Any, ...],
    *counts: int,
    strided: tuple[Tensor, ...] | None = None,
    **constants: Any,
) -> None:
    """Launches `kernel(tensors, strides, sizes, counts, constants)` over all rows of the first of
    the `strided` tensors. Strides are those of `strided`, by default of all `tensors`."""
    strided = strided or tensors
    first = strided[0]
    if first.dim() == 4:
        batch, length, heads, width = first.shape
        rows, columns = _block_shape(width)
        constants |= {"WIDTH": width, "COLUMNS": columns}
    else:
        batch, heads, length = first.shape
        rows = _BLOCK_STATISTICS
    strides, sizes = tuple(map(kernels.row_stride, strided)), (batch * length * heads, batch, heads)
    grid = (triton.cdiv(sizes[0], rows),)
    kernel[grid](*tensors, strides, sizes, *counts, ROWS=rows, **constants)


def _block_shape(width: int) -> tuple[int, int]:
    """(rows, columns) of a block; columns past the width are masked."""
    columns: int = triton.next_power_of_2(width)
    return max(1, _BLOCK_ELEMENTS // columns), columns


def _equal_steps(tensors: Sequence[Tensor]) -> int | None:
    """The distance in elements from each tensor to the next, so that a kernel can walk over them.
    None if distances, dtypes or strides differ."""
    first, size = tensors[0], tensors[0].element_size()
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(tensors)} or {0}
    step = steps.pop()
    alike = _same_strides(tensors) and all(x.dtype == first.dtype for x in tensors)
    return None if steps or step % size or not alike else step // size
