"""How the fused kernels find their rows: strided (B, S, H, width) views, nothing is ever reordered.

A program takes a block of rows. Rows are numbered with the head fastest and the sequence slowest,
which is the order in which buffers lie in memory, so neighbours in a block are neighbours there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["block_shape", "place", "row_stride", "statistic_stride"]

# 2,048 elements for 128 threads: two 16-byte loads of bf16 or four of fp32 in flight for each.
_ELEMENTS = 2048


@triton.jit
def place(row: tl.tensor, batch: tl.tensor, heads: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """Offset of a row; `stride` is (batch, sequence, head). 64-bit: buffers pass 2 GiB easily."""
    head = row % heads
    rest = row // heads
    return (
        (rest % batch).to(tl.int64) * stride[0]
        + (rest // batch).to(tl.int64) * stride[1]
        + head.to(tl.int64) * stride[2]
    )


def row_stride(x_BSHE: Tensor) -> tuple[int, int, int]:
    stride = x_BSHE.stride()
    return stride[0], stride[1], stride[2]


def statistic_stride(x_BHS: Tensor) -> tuple[int, int, int]:
    stride = x_BHS.stride()
    return stride[0], stride[2], stride[1]


def block_shape(width: int) -> tuple[int, int]:
    """(rows, columns) of a block; columns past the width are masked."""
    columns: int = triton.next_power_of_2(width)
    return max(1, _ELEMENTS // columns), columns
