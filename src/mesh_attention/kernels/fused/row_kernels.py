"""One kernel for each piece of work on rows: partial results merged or added up; delta, rescaling,
the stand-in output, a finite log-sum-exp; and statistics as cuDNN Frontend's backward kernels take
them, in whole tiles of a head.

`kernels/rows.py` has the plain form and the reasons. A row without weight (lse = -inf) is never
loaded, so whatever it holds, NaN too, cannot matter. Sums are made in fp32 and rounded once.

Rows are found in strided (B, S, H, width) views; nothing is ever reordered. A program takes a block
of rows, numbered with the head fastest and the sequence slowest, which is the order in which
buffers lie in memory, so neighbours in a block are neighbours there. A kernel takes its tensors,
their `strides` in the same order, and the `sizes` (rows, batch, heads).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mesh_attention.kernels.rows import UNSEEN_LSE

_TILE_ROWS = 128  # of a program of `tiled_statistics_kernel`
_STEP = 2048


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


@triton.jit
def merge_into_kernel(
    acc, acc_lse, out, lse, strides, sizes,
    WIDTH: tl.constexpr, FRESH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    acc_lse += place(row, sizes, strides[1])
    acc += place(row, sizes, strides[0])[:, None] + column
    out += place(row, sizes, strides[2])[:, None] + column
    new = tl.load(lse + place(row, sizes, strides[3]), inside, other=-float("inf"))
    value = tl.load(out, cells & (new != -float("inf"))[:, None], other=0.0).to(tl.float32)
    if not FRESH:
        old = tl.load(acc_lse, inside, other=-float("inf"))
        # Weights from the difference: they add up to one even where adding to the lse is lost.
        advantage = new - old
        advantage = tl.where(advantage == advantage, advantage, 0.0)  # both -inf
        total = tl.load(acc, cells & (old != -float("inf"))[:, None], other=0.0)
        new_weight = 1.0 / (1.0 + tl.exp(-advantage))
        old_weight = 1.0 / (1.0 + tl.exp(advantage))
        value = total * old_weight[:, None] + value * new_weight[:, None]
        new = tl.maximum(old, new) + tl.log(1.0 + tl.exp(-tl.abs(advantage)))
    tl.store(acc, value, cells)
    tl.store(acc_lse, new, inside)


@triton.jit
def _join(value, best, weight, part, part_lse, inside, cells):
    """One more partial result into the running (sum of weighted values, largest lse, weight)."""
    new = tl.load(part_lse, inside, other=-float("inf"))
    top = tl.maximum(best, new)
    base = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp(best - base)
    share = tl.exp(new - base)
    # Unseen rows are not read; neither are those whose share is lost in rounding to zero.
    more = tl.load(part, cells & (share > 0)[:, None], other=0.0).to(tl.float32)
    return value * shrink[:, None] + more * share[:, None], top, weight * shrink + share


@triton.jit
def merge_all_kernel(
    parts, lses, out, lse, strides, sizes, count, part_step, lse_step,
    LOOSE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`parts` and `lses` are tuples of `LOOSE` partial results, anywhere in memory and of any
    dtypes; or, if that is zero, the first of `count` that lie in memory at equal distances."""
    row, column, inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    at = place(row, sizes, strides[0])[:, None] + column
    lse_at = place(row, sizes, strides[1])
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if LOOSE:
        for i in tl.static_range(LOOSE):
            value, best, weight = _join(
                value, best, weight, parts[i] + at, lses[i] + lse_at, inside, cells
            )
    else:
        parts += at
        lses += lse_at
        for _ in range(count):
            value, best, weight = _join(value, best, weight, parts, lses, inside, cells)
            parts += part_step
            lses += lse_step
    out += place(row, sizes, strides[2])[:, None] + column
    lse += place(row, sizes, strides[3])
    seen = weight > 0
    value = value / tl.where(seen, weight, 1.0)[:, None]
    tl.store(out, value.to(out.dtype.element_ty), cells)
    tl.store(lse, tl.where(seen, best + tl.log(tl.where(seen, weight, 1.0)), best), inside)


@triton.jit
def merge_lse_kernel(parts, target, strides, sizes, count, step, ROWS: tl.constexpr):
    """The log-sum-exp of the whole, in one pass over those of its parts, which lie in memory at
    equal distances, any number of them."""
    row, inside = own_rows(sizes, ROWS)
    parts += place(row, sizes, strides[0])
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
    tl.store(target + place(row, sizes, strides[1]), value, inside)


@triton.jit
def sum_kernel(
    parts, target, strides, sizes, count, step,
    LOOSE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`parts` is a tuple of `LOOSE` copies, anywhere in memory, of any dtypes and strides, of which
    the target may be one; or, if that is zero, the first of `count` at equal distances. The last of
    `strides` is that of the target."""
    row, column, _inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if LOOSE:
        for i in tl.static_range(LOOSE):
            at = place(row, sizes, strides[i])[:, None] + column
            total += tl.load(parts[i] + at, cells, other=0.0).to(tl.float32)
    else:
        parts += place(row, sizes, strides[0])[:, None] + column
        for _ in range(count):
            total += tl.load(parts, cells, other=0.0).to(tl.float32)
            parts += step
    target += place(row, sizes, strides[LOOSE if LOOSE else 1])[:, None] + column
    tl.store(target, total.to(target.dtype.element_ty), cells)


@triton.jit
def delta_kernel(
    out, grad_out, target, strides, sizes,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    out += place(row, sizes, strides[0])[:, None] + column
    grad_out += place(row, sizes, strides[1])[:, None] + column
    value = tl.load(out, cells, other=0.0).to(tl.float32)
    grad = tl.load(grad_out, cells, other=0.0).to(tl.float32)
    tl.store(target + place(row, sizes, strides[2]), tl.sum(value * grad, axis=1), inside)


@triton.jit
def rescale_kernel(
    out, partial_lse, global_lse, target, strides, sizes,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    part = tl.load(partial_lse + place(row, sizes, strides[1]), inside, other=-float("inf"))
    whole = tl.load(global_lse + place(row, sizes, strides[2]), inside, other=0.0)
    seen = part != -float("inf")
    weight = tl.where(seen, tl.exp(part - whole), 0.0)
    out += place(row, sizes, strides[0])[:, None] + column
    value = tl.load(out, cells & seen[:, None], other=0.0).to(tl.float32) * weight[:, None]
    target += place(row, sizes, strides[3])[:, None] + column
    tl.store(target, value.to(target.dtype.element_ty), cells)


@triton.jit
def stand_in_kernel(
    grad_out, delta, target, strides, sizes,
    LIMIT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside, cells = own_cells(sizes, WIDTH, ROWS, COLUMNS)
    grad_out += place(row, sizes, strides[0])[:, None] + column
    grad = tl.load(grad_out, cells, other=0.0).to(tl.float32)
    rest = tl.load(delta + place(row, sizes, strides[1]), inside, other=0.0)
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
    target += place(row, sizes, strides[2])[:, None] + column
    tl.store(target, value.to(target.dtype.element_ty), cells)


@triton.jit
def finite_lse_kernel(lse, target, strides, sizes, UNSEEN: tl.constexpr, ROWS: tl.constexpr):
    row, inside = own_rows(sizes, ROWS)
    value = tl.load(lse + place(row, sizes, strides[0]), inside, other=0.0)
    value = tl.where(value == -float("inf"), UNSEEN, value)
    tl.store(target + place(row, sizes, strides[1]), value, inside)


@triton.jit
def tiled_statistics_kernel(
    delta, lse, tiled_delta, tiled_lse, grad_q, strides, num_heads, num_rows, num_tiled,
    UNSEEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A program has `ROWS` rows of one head. `grad_q`, cleared, has `WIDTH` cells a row."""
    first = tl.program_id(0) * ROWS
    of_head = tl.program_id(1).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    real, tiled = row < num_rows, row < num_tiled
    batch, head, row = of_head // num_heads, of_head % num_heads, row.to(tl.int64)
    delta += batch * strides[0][0] + head * strides[0][2]
    lse += batch * strides[1][0] + head * strides[1][2]
    sums = tl.load(delta + row * strides[0][1], real, other=0.0)
    value = tl.load(lse + row * strides[1][1], real, other=-float("inf"))
    value = tl.where(value == -float("inf"), UNSEEN, value) * 1.4426950408889634
    target = of_head * num_tiled + row
    tl.store(tiled_delta + target, sums, tiled)
    tl.store(tiled_lse + target, value, tiled)
    if WIDTH > 0:
        grad_q += (of_head * num_tiled + first) * WIDTH
        cells = tl.minimum(num_tiled - first, ROWS) * WIDTH
        nothing = tl.zeros([STEP], tl.float32)
        for at in range(0, ROWS * WIDTH, STEP):
            cell = at + tl.arange(0, STEP)
            tl.store(grad_q + cell, nothing, cell < cells)


def tile_statistics(
    delta_BHS: Tensor,
    lse_BHS: Tensor,
    tiled_delta: Tensor,
    tiled_lse: Tensor,
    grad_q: Tensor | None,
) -> None:
    """Into contiguous (B, H, whole tiles of rows): delta, zero where there is no row, and the
    log-sum-exp to the base of two, which hides rows that saw nothing and those that are none. The
    accumulator of dq, (B, H, rows * width), is cleared on the way."""
    B, H, S = delta_BHS.shape
    num_tiled = tiled_delta.shape[2]
    tiled_statistics_kernel[(triton.cdiv(num_tiled, _TILE_ROWS), B * H)](
        delta_BHS,
        lse_BHS,
        tiled_delta,
        tiled_lse,
        tiled_delta if grad_q is None else grad_q,
        (row_stride(delta_BHS), row_stride(lse_BHS)),
        H,
        S,
        num_tiled,
        UNSEEN=UNSEEN_LSE,
        WIDTH=0 if grad_q is None else grad_q.shape[2] // num_tiled,
        ROWS=_TILE_ROWS,
        STEP=_STEP,
    )
