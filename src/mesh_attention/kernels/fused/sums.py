"""Sums of copies in fp32, rounded once: gradients that are added up, and changes of precision."""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.addressing import place

__all__ = ["sum_loose_kernel", "sum_stacked_kernel"]


@triton.jit
def sum_stacked_kernel(
    parts: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    step: tl.tensor,
    part_stride: tl.tensor,
    target_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copies that lie in memory at equal distances, any number of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    cells = (row < num_rows)[:, None] & (column < WIDTH)
    parts += place(row, batch, heads, part_stride)[:, None] + column
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(count):
        total += tl.load(parts, cells, other=0.0).to(tl.float32)
        parts += step
    target += place(row, batch, heads, target_stride)[:, None] + column
    tl.store(target, total.to(target.dtype.element_ty), cells)


@triton.jit
def sum_loose_kernel(
    parts: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    part_strides: tl.tensor,
    target_stride: tl.tensor,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copies anywhere in memory, of any dtypes and strides; the target may be one of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    cells = (row < num_rows)[:, None] & (column < WIDTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(COUNT):
        at = place(row, batch, heads, part_strides[i])[:, None] + column
        total += tl.load(parts[i] + at, cells, other=0.0).to(tl.float32)
    target += place(row, batch, heads, target_stride)[:, None] + column
    tl.store(target, total.to(target.dtype.element_ty), cells)
