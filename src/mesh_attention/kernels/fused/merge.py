"""Several partial results made one: merged by softmax, by log-sum-exp, or added up.

`rows.py` has the plain form and the reasons. A row without weight (lse = -inf) is never
loaded, so whatever it holds, NaN too, cannot matter. Sums are made in fp32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.addressing import own_cells, own_rows, place


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
