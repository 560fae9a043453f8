"""What the attention kernels share: tiles of rows, runs of blocks, and scores.

`SCORES` says how scores are made of a product of queries and keys: 0 for the product itself,
SCALED for the product times `inner_scale` (which may be zero or less), CAPPED for its
tanh. Times `scale` they are exponents of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALED = tl.constexpr(1)
CAPPED = tl.constexpr(2)

# Kernels are not compiled anew for them: batches come in all lengths. Then nothing is known of a
# length, and numbers of rows that a loop reads would be loaded one by one: tables of them have
# whole blocks (`whole_blocks`), so that a load is of all rows of a tile, and at a multiple of it.
LENGTHS = ("num_queries", "num_keys", "num_heads", "num_groups")

# Of fp32 products. "tf32x3" takes tensor cores, and its errors are a few times as large.
PRECISION = tl.constexpr("ieee")

_TABLE_COLUMNS = tl.constexpr(5)  # of lists of blocks, `range_blocks.py`
_TWO_LOG2_E = tl.constexpr(2.8853900817779268)


@triton.jit
def own_block(table, num_heads, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(entry of the table, first row, batch, head) of this program, which takes `ROWS` rows of a
    block."""
    SHARES: tl.constexpr = BLOCK // ROWS
    entry = table + tl.program_id(0) // SHARES * _TABLE_COLUMNS
    start = tl.load(entry) * BLOCK + tl.program_id(0) % SHARES * ROWS
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    return entry, start, batch, head


@triton.jit
def tile_offsets(row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_tile(
    x, row_stride, rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """The tile that begins at `x`. Zeros past the width, and, if they are checked, in place of
    other rows than `rows`: those past the end, and padding, which may hold anything."""
    pointers = x + tile_offsets(row_stride, ROWS, COLUMNS)
    row = rows[:, None]
    column = tl.arange(0, COLUMNS)[None, :] < WIDTH
    if CHECK_ROWS and WIDTH < COLUMNS:
        tile = tl.load(pointers, mask=row & column, other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=row, other=0.0)
    elif WIDTH < COLUMNS:
        tile = tl.load(pointers, mask=column, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_rows(
    source, described, batch, start, head, row_stride, rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """From a pointer to the first row of a head, or, where every row is wanted and there is one, by
    the descriptor of the whole tensor (B, S, H, D): the hardware then loads the tile by itself."""
    if DESCRIBED and not CHECK_ROWS:
        place = [batch.to(tl.int32), start, head.to(tl.int32), 0]
        tile = tl.reshape(described.load(place), [ROWS, COLUMNS])
    else:
        first = source + start.to(tl.int64) * row_stride
        tile = load_tile(first, row_stride, rows, ROWS, COLUMNS, WIDTH, CHECK_ROWS)
    return tile


@triton.jit
def store_tile(
    x, row_stride, value, rows_left,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """At `x`; no more than `rows_left` rows, and no column past the width."""
    pointers = x + tile_offsets(row_stride, ROWS, COLUMNS)
    row = tl.arange(0, ROWS)[:, None] < rows_left
    value = value.to(pointers.dtype.element_ty)
    if WIDTH < COLUMNS:
        tl.store(pointers, value, mask=row & (tl.arange(0, COLUMNS)[None, :] < WIDTH))
    else:
        tl.store(pointers, value, mask=row)


@triton.jit
def first_piece(runs, run, PIECES: tl.constexpr):
    """(the first piece of a run of blocks, the end of the run), in pieces of a block."""
    return tl.load(runs + run) * PIECES, tl.load(runs + run + 1) * PIECES


@triton.jit
def next_piece(runs, run, at, end, PIECES: tl.constexpr):
    """(run, piece, end of the run). Without a branch, and an iteration before it is needed, so
    that loads of tiles can be pipelined over the ends of runs."""
    ended = at + 1 == end
    run = tl.where(ended, run + 2, run)
    at = tl.where(ended, tl.load(runs + run) * PIECES, at + 1)
    return run, at, tl.load(runs + run + 1) * PIECES


@triton.jit
def whole_blocks(length, BLOCK: tl.constexpr):
    """The length of a table of so many rows."""
    return tl.cdiv(length, BLOCK) * BLOCK


@triton.jit
def visible(
    row_lo, row_hi, at_key, lo, hi, start, num_queries,
    INTERVALS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEY_DIM: tl.constexpr,
):  # fmt: skip
    """Whether the rows from `start` on see keys, whose positions lie along `KEY_DIM`. The first
    interval of the rows is loaded already."""
    seen = (tl.expand_dims(row_lo, KEY_DIM) <= at_key) & (at_key < tl.expand_dims(row_hi, KEY_DIM))
    for interval in tl.static_range(1, INTERVALS):
        at = interval * whole_blocks(num_queries, BLOCK) + start
        more_lo = tl.expand_dims(tl.load(lo + at + tl.arange(0, ROWS)), KEY_DIM)
        more_hi = tl.expand_dims(tl.load(hi + at + tl.arange(0, ROWS)), KEY_DIM)
        seen |= (more_lo <= at_key) & (at_key < more_hi)
    return seen


@triton.jit
def scores_of(product, inner_scale, SCORES: tl.constexpr):
    scores = product
    if SCORES == SCALED:
        scores = product * inner_scale
    elif SCORES == CAPPED:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(product * (inner_scale * _TWO_LOG2_E)))
    return scores
