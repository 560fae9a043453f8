"""How the fused kernels find their rows: strided (B, S, H, width) views, nothing is ever reordered.

A program takes a block of rows. Rows are numbered with the head fastest and the sequence slowest,
which is the order in which buffers lie in memory, so neighbours in a block are neighbours there.
A kernel takes its tensors, their `strides` in the same order, and the `sizes` (rows, batch, heads).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

# 2,048 elements for 128 threads: two 16-byte loads of bf16 or four of fp32 in flight for each.
_ELEMENTS = 2048


@triton.jit
def own_rows(sizes, ROWS: tl.constexpr):
    """(numbers of the rows of this program, whether they exist)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row, row < sizes[0]


@triton.jit
def own_cells(sizes, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column, whether a row exists, whether a cell does) of the block of this program"""
    row, inside = own_rows(sizes, ROWS)
    column = tl.arange(0, COLUMNS)
    return row, column, inside, inside[:, None] & (column < WIDTH)


@triton.jit
def place(row, sizes, stride):
    """Offset of a row; `stride` is (batch, sequence, head). 64-bit: buffers pass 2 GiB easily."""
    head = row % sizes[2]
    rest = row // sizes[2]
    return (
        (rest % sizes[1]).to(tl.int64) * stride[0]
        + (rest // sizes[1]).to(tl.int64) * stride[1]
        + head.to(tl.int64) * stride[2]
    )


def row_stride(x: Tensor) -> tuple[int, int, int]:
    """Of tokens (B, S, H, E) or statistics (B, H, S)."""
    stride = x.stride()
    if x.dim() == 4:
        return stride[0], stride[1], stride[2]
    return stride[0], stride[2], stride[1]


def block_shape(width: int) -> tuple[int, int]:
    """(rows, columns) of a block; columns past the width are masked."""
    columns: int = triton.next_power_of_2(width)
    return max(1, _ELEMENTS // columns), columns


def equal_steps(tensors: Sequence[Tensor]) -> int | None:
    """Elements from each tensor to the next, where they lie in memory at equal distances, so that
    a kernel can walk over them; None if they differ in that, in dtype or in strides."""
    first = tensors[0]
    if len(tensors) == 1:
        return 0
    size = first.element_size()
    step = tensors[1].data_ptr() - first.data_ptr()
    if step % size:
        return None
    before = first
    for x in tensors[1:]:
        if x.data_ptr() - before.data_ptr() != step:
            return None
        if x.dtype != first.dtype or x.stride() != first.stride():
            return None
        before = x
    return step // size
