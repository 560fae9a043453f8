"""The log-sum-exp of the whole from those of its parts, in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.addressing import place

__all__ = ["merge_lse_loose_kernel", "merge_lse_stacked_kernel"]


@triton.jit
def _join(best: tl.tensor, weight: tl.tensor, part: tl.tensor, inside: tl.tensor) -> tl.tensor:
    new = tl.load(part, inside, other=-float("inf"))
    top = tl.maximum(best, new)
    base = tl.where(top == -float("inf"), 0.0, top)
    return top, weight * tl.exp(best - base) + tl.exp(new - base)


@triton.jit
def _finish(best: tl.tensor, weight: tl.tensor, target: tl.tensor, inside: tl.tensor) -> None:
    seen = weight > 0
    tl.store(target, tl.where(seen, best + tl.log(tl.where(seen, weight, 1.0)), best), inside)


@triton.jit
def merge_lse_stacked_kernel(
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
        best, weight = _join(best, weight, parts, inside)
        parts += step
    _finish(best, weight, target + place(row, batch, heads, target_stride), inside)


@triton.jit
def merge_lse_loose_kernel(
    parts: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    part_strides: tl.tensor,
    target_stride: tl.tensor,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Parts anywhere in memory; `parts` and `part_strides` are tuples."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    best = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(COUNT):
        part = parts[i] + place(row, batch, heads, part_strides[i])
        best, weight = _join(best, weight, part, inside)
    _finish(best, weight, target + place(row, batch, heads, target_stride), inside)
