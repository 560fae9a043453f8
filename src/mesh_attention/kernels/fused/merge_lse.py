"""The log-sum-exp of the whole from those of its parts, in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.addressing import place

__all__ = ["merge_lse_kernel"]


@triton.jit
def merge_lse_kernel(
    parts: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    step: tl.tensor,
    part_stride: tl.tensor,
    target_stride: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Parts that lie in memory at equal distances, any number of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    parts += place(row, batch, heads, part_stride)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for _ in range(count):
        new = tl.load(parts, inside, other=-float("inf"))
        top = tl.maximum(best, new)
        base = tl.where(top == -float("inf"), 0.0, top)
        weight = weight * tl.exp(best - base) + tl.exp(new - base)
        best = top
        parts += step
    seen = weight > 0
    value = tl.where(seen, best + tl.log(tl.where(seen, weight, 1.0)), best)
    tl.store(target + place(row, batch, heads, target_stride), value, inside)
