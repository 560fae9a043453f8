"""`FusedRows`: work on rows by one Triton kernel each, on strided views, without temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from mesh_attention.kernels.fused.addressing import (
    block_shape,
    equal_steps,
    row_stride,
    statistic_stride,
)
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
from mesh_attention.kernels.plain_rows import UNSEEN_LSE, PlainRows

# Loose copies are unrolled into the kernel, so their number must stay small.
_MOST_LOOSE = 32
_STATISTICS = 1024  # of a program, where one number is all there is of a row


class FusedRows:
    name = "fused"

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        grid, sizes, block = _launch(acc_out)
        merge_into_kernel[grid](
            *(acc_out, acc_lse, out, lse, *sizes),
            *(row_stride(acc_out), statistic_stride(acc_lse)),
            *(row_stride(out), statistic_stride(lse)),
            FRESH=fresh,
            **block,
        )

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        grid, sizes, block = _launch(out)
        strides = (row_stride(outs[0]), statistic_stride(lses[0]))
        targets = (row_stride(out), statistic_stride(lse))
        part_step, lse_step = equal_steps(outs), equal_steps(lses)
        if part_step is not None and lse_step is not None:
            merge_stacked_kernel[grid](
                *(outs[0], lses[0], out, lse, *sizes, len(outs)),
                *(part_step, lse_step, *strides, *targets),
                **block,
            )
        elif len(outs) <= _MOST_LOOSE and _alike(outs) and _alike(lses):
            merge_loose_kernel[grid](
                *(tuple(outs), tuple(lses), out, lse, *sizes, *strides, *targets),
                COUNT=len(outs),
                **block,
            )
        else:
            PlainRows().merge_all(outs, lses, out, lse)

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        step = equal_steps(parts)
        if step is None:  # plans stack them
            PlainRows().merge_lse(parts, target)
            return
        grid, sizes = _launch_statistics(target)
        merge_lse_kernel[grid](
            *(parts[0], target, *sizes, len(parts), step),
            *(statistic_stride(parts[0]), statistic_stride(target)),
            ROWS=_STATISTICS,
        )

    def rescale(self, out: Tensor, partial_lse: Tensor, global_lse: Tensor, target: Tensor) -> None:
        grid, sizes, block = _launch(out)
        rescale_kernel[grid](
            *(out, partial_lse, global_lse, target, *sizes),
            *(row_stride(out), statistic_stride(partial_lse)),
            *(statistic_stride(global_lse), row_stride(target)),
            **block,
        )

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        grid, sizes, block = _launch(target)
        step = equal_steps(parts)
        if len(parts) > 2 and step is not None:
            sum_stacked_kernel[grid](
                *(parts[0], target, *sizes, len(parts), step),
                *(row_stride(parts[0]), row_stride(target)),
                **block,
            )
        elif len(parts) <= _MOST_LOOSE:
            sum_loose_kernel[grid](
                *(tuple(parts), target, *sizes),
                *(tuple(row_stride(part) for part in parts), row_stride(target)),
                COUNT=len(parts),
                **block,
            )
        else:
            PlainRows().sum(parts, target)

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None:
        grid, sizes, block = _launch(out)
        delta_kernel[grid](
            *(out, grad_out, target, *sizes),
            *(row_stride(out), row_stride(grad_out), statistic_stride(target)),
            **block,
        )

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        target = torch.empty(grad_out.shape, dtype=grad_out.dtype, device=grad_out.device)
        grid, sizes, block = _launch(grad_out)
        stand_in_kernel[grid](
            *(grad_out, delta, target, *sizes),
            *(row_stride(grad_out), statistic_stride(delta), row_stride(target)),
            LIMIT=torch.finfo(grad_out.dtype).max,
            **block,
        )
        return target

    def finite_lse(self, lse: Tensor) -> Tensor:
        target = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        grid, sizes = _launch_statistics(lse)
        finite_lse_kernel[grid](
            *(lse, target, *sizes),
            *(statistic_stride(lse), statistic_stride(target)),
            UNSEEN=UNSEEN_LSE,
            ROWS=_STATISTICS,
        )
        return target


def _alike(tensors: Sequence[Tensor]) -> bool:
    return all(x.stride() == tensors[0].stride() for x in tensors)


def _launch_statistics(x_BHS: Tensor) -> tuple[tuple[int], tuple[int, int, int]]:
    """Grid and (rows, batch, heads) of a kernel that takes every number of x once."""
    batch, heads, length = x_BHS.shape
    num_rows = batch * heads * length
    return (triton.cdiv(num_rows, _STATISTICS),), (num_rows, batch, heads)


def _launch(x_BSHE: Tensor) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Grid, (rows, batch, heads) and block of a kernel that takes every row of x once."""
    batch, length, heads, width = x_BSHE.shape
    num_rows = batch * length * heads
    rows, columns = block_shape(width)
    block = {"WIDTH": width, "ROWS": rows, "COLUMNS": columns}
    return (triton.cdiv(num_rows, rows),), (num_rows, batch, heads), block
