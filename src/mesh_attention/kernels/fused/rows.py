"""`FusedRows`: work on rows by one Triton kernel each, on strided views, without temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from mesh_attention.kernels.fused.addressing import block_shape, equal_steps, row_stride
from mesh_attention.kernels.fused.merge import (
    merge_into_kernel,
    merge_loose_kernel,
    merge_lse_kernel,
    merge_stacked_kernel,
    sum_loose_kernel,
    sum_stacked_kernel,
)
from mesh_attention.kernels.fused.statistics import (
    delta_kernel,
    finite_lse_kernel,
    rescale_kernel,
    stand_in_kernel,
)
from mesh_attention.kernels.rows import UNSEEN_LSE, RowKernels

# Loose copies are unrolled into the kernel, so their number must stay small.
_MOST_LOOSE = 32
_STATISTICS = 1024  # of a program, where one number is all there is of a row


class FusedRows(RowKernels):
    """What the kernels cannot take is left to the plain form."""

    name = "fused"

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        tensors = (acc_out, acc_lse, out, lse)
        _launch(merge_into_kernel, acc_out, tensors, _strides(*tensors), FRESH=fresh)

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        strides = _strides(outs[0], lses[0], out, lse)
        part_step, lse_step = equal_steps(outs), equal_steps(lses)
        if part_step is not None and lse_step is not None:
            tensors = (outs[0], lses[0], out, lse)
            counts = (len(outs), part_step, lse_step)
            _launch(merge_stacked_kernel, out, tensors, strides, *counts)
        elif len(outs) <= _MOST_LOOSE and _alike(outs) and _alike(lses):
            parts = (tuple(outs), tuple(lses), out, lse)
            _launch(merge_loose_kernel, out, parts, strides, COUNT=len(outs))
        else:
            super().merge_all(outs, lses, out, lse)

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        step = equal_steps(parts)
        if step is None:  # plans stack them
            super().merge_lse(parts, target)
            return
        tensors = (parts[0], target)
        _launch(merge_lse_kernel, target, tensors, _strides(*tensors), len(parts), step)

    def rescale(self, out: Tensor, partial_lse: Tensor, global_lse: Tensor, target: Tensor) -> None:
        tensors = (out, partial_lse, global_lse, target)
        _launch(rescale_kernel, out, tensors, _strides(*tensors))

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        step = equal_steps(parts)
        if len(parts) > 2 and step is not None:
            tensors = (parts[0], target)
            _launch(sum_stacked_kernel, target, tensors, _strides(*tensors), len(parts), step)
        elif len(parts) <= _MOST_LOOSE:
            copies, strides = (tuple(parts), target), _strides(*parts, target)
            _launch(sum_loose_kernel, target, copies, strides, COUNT=len(parts))
        else:
            super().sum(parts, target)

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None:
        tensors = (out, grad_out, target)
        _launch(delta_kernel, out, tensors, _strides(*tensors))

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        target = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
        tensors, limit = (grad_out, delta, target), torch.finfo(grad_out.dtype).max
        _launch(stand_in_kernel, grad_out, tensors, _strides(*tensors), LIMIT=limit)
        return target

    def finite_lse(self, lse: Tensor) -> Tensor:
        target = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        tensors = (lse, target)
        _launch(finite_lse_kernel, lse, tensors, _strides(*tensors), UNSEEN=UNSEEN_LSE)
        return target


def _alike(tensors: Sequence[Tensor]) -> bool:
    return all(x.stride() == tensors[0].stride() for x in tensors)


def _strides(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    return tuple(map(row_stride, tensors))


def _launch(
    kernel: Any,
    x: Tensor,
    tensors: tuple[Any, ...],
    strides: tuple[tuple[int, int, int], ...],
    *counts: int,
    **constants: Any,
) -> None:
    """A kernel that takes every row of the tokens or statistics `x` once."""
    if x.dim() == 4:
        batch, length, heads, width = x.shape
        rows, columns = block_shape(width)
        constants |= {"WIDTH": width, "COLUMNS": columns}
    else:
        batch, heads, length = x.shape
        rows = _STATISTICS
    sizes = (batch * length * heads, batch, heads)
    kernel[(triton.cdiv(sizes[0], rows),)](
        *tensors, strides, sizes, *counts, ROWS=rows, **constants
    )
