"""Numbers of a row: delta, rescaling by log-sum-exp, the stand-in output, a finite log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.addressing import place


@triton.jit
def delta_kernel(
    out: tl.tensor,
    grad_out: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    grad_stride: tl.tensor,
    target_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < num_rows
    cells = inside[:, None] & (column < WIDTH)
    out += place(row, batch, heads, out_stride)[:, None] + column
    grad_out += place(row, batch, heads, grad_stride)[:, None] + column
    product = tl.load(out, cells, other=0.0).to(tl.float32) * tl.load(
        grad_out, cells, other=0.0
    ).to(tl.float32)
    tl.store(target + place(row, batch, heads, target_stride), tl.sum(product, axis=1), inside)


@triton.jit
def rescale_kernel(
    out: tl.tensor,
    partial_lse: tl.tensor,
    global_lse: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    partial_lse_stride: tl.tensor,
    global_lse_stride: tl.tensor,
    target_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < num_rows
    cells = inside[:, None] & (column < WIDTH)
    part = tl.load(
        partial_lse + place(row, batch, heads, partial_lse_stride), inside, other=-float("inf")
    )
    whole = tl.load(global_lse + place(row, batch, heads, global_lse_stride), inside, other=0.0)
    seen = part != -float("inf")
    weight = tl.where(seen, tl.exp(part - whole), 0.0)
    out += place(row, batch, heads, out_stride)[:, None] + column
    value = tl.load(out, cells & seen[:, None], other=0.0).to(tl.float32) * weight[:, None]
    target += place(row, batch, heads, target_stride)[:, None] + column
    tl.store(target, value.to(target.dtype.element_ty), cells)


@triton.jit
def stand_in_kernel(
    grad_out: tl.tensor,
    delta: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    grad_stride: tl.tensor,
    delta_stride: tl.tensor,
    target_stride: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < num_rows
    cells = inside[:, None] & (column < WIDTH)
    grad_out += place(row, batch, heads, grad_stride)[:, None] + column
    grad = tl.load(grad_out, cells, other=0.0).to(tl.float32)
    rest = tl.load(delta + place(row, batch, heads, delta_stride), inside, other=0.0)
    # Magnitude and column as one whole number, so that one maximum finds both. The low bits of the
    # magnitude make room for the column: fp16 and bf16 have zeros there, fp32 loses what only
    # decides between entries of nearly the same size.
    bits = grad.to(tl.int32, bitcast=True)
    key = tl.where(cells, (bits & 0x7FFFE000) | column, -1)
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in tl.static_range(2 if WIDTH > 1 else 1):
        here = column == (tl.max(key, axis=1) & 0x1FFF)[:, None]
        divisor = tl.sum(tl.where(here, grad, 0.0), axis=1)
        usable = divisor != 0
        # A second largest entry near zero may call for more than the dtype holds.
        entry = tl.where(usable, rest / tl.where(usable, divisor, 1.0), 0.0)
        entry = tl.minimum(tl.maximum(entry, -LIMIT), LIMIT)
        entry = entry.to(target.dtype.element_ty).to(tl.float32)
        rest -= entry * divisor
        value = tl.where(here, entry[:, None], value)
        key = tl.where(here, -1, key)
    target += place(row, batch, heads, target_stride)[:, None] + column
    tl.store(target, value.to(target.dtype.element_ty), cells)


@triton.jit
def finite_lse_kernel(
    lse: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    lse_stride: tl.tensor,
    target_stride: tl.tensor,
    UNSEEN: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    value = tl.load(lse + place(row, batch, heads, lse_stride), inside, other=0.0)
    value = tl.where(value == -float("inf"), UNSEEN, value)
    tl.store(target + place(row, batch, heads, target_stride), value, inside)
