"""Attention backward for any row ranges, first of two kernels: dQ.

Neither uses atomics: sums are made in one order, so results are the same every time. Both take the
log-sum-exp and delta of the *whole* softmax, of which the block is a part; this one leaves them for
the second (`attention_backward_keys.py`) in the form and order that its inner loop wants:
(2, B, H, whole blocks of rows), the log-sum-exp to the base of two. With `AHEAD` the product of dO
and values is begun before the exponentials, so that both run at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.attention_tiles import (
    CAPPED,
    LENGTHS,
    PRECISION,
    first_piece,
    load_rows,
    load_tile,
    next_piece,
    row_bounds,
    scores_of,
    store_tile,
    tile_offsets,
    whole_blocks,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNSEEN = tl.constexpr(1e30)  # two to the power of any score less this is zero
_TABLE_COLUMNS = tl.constexpr(5)


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_queries_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    k_described: tl.tensor, v_described: tl.tensor, grad_out: tl.tensor, lse: tl.tensor,
    delta: tl.tensor,
    statistics: tl.tensor, dq: tl.tensor,
    lo: tl.tensor, hi: tl.tensor, key_position: tl.tensor, runs: tl.tensor, table: tl.tensor,
    q_batch: tl.tensor, q_row: tl.tensor, q_head: tl.tensor,
    k_batch: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    v_batch: tl.tensor, v_row: tl.tensor, v_head: tl.tensor,
    grad_batch: tl.tensor, grad_row: tl.tensor, grad_head: tl.tensor,
    lse_batch: tl.tensor, lse_row: tl.tensor, lse_head: tl.tensor,
    delta_batch: tl.tensor, delta_row: tl.tensor, delta_head: tl.tensor,
    dq_batch: tl.tensor, dq_row: tl.tensor, dq_head: tl.tensor,
    num_queries: tl.tensor, num_heads: tl.tensor,
    scale: tl.tensor, inner_scale: tl.tensor, softmax_scale: tl.tensor,
    REPEATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, SCORES: tl.constexpr, INTERVALS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """If `DESCRIBED` there are descriptors of `k` and `v` too, in tiles of `KEYS` rows."""
    SHARES: tl.constexpr = BLOCK // ROWS
    entry = table + tl.program_id(0) // SHARES * _TABLE_COLUMNS
    start = tl.load(entry) * BLOCK + tl.program_id(0) % SHARES * ROWS
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    group = head // REPEATS
    start_row = start.to(tl.int64)
    rows_left = num_queries - start
    row = tl.arange(0, ROWS)
    inside = row < rows_left

    lse += batch * lse_batch + head * lse_head + start_row * lse_row
    delta += batch * delta_batch + head * delta_head + start_row * delta_row
    base = tl.load(lse + row * lse_row, mask=inside, other=-float("inf"))
    unseen = base == -float("inf")
    base = tl.where(unseen, _UNSEEN, base * _LOG2_E)
    row_delta = tl.load(delta + row * delta_row, mask=inside, other=0.0)
    row_delta = tl.where(unseen, 0.0, row_delta)
    num_rows = whole_blocks(num_queries, BLOCK)
    statistics += tl.program_id(1).to(tl.int64) * num_rows + start
    tl.store(statistics + row, base)
    statistics += tl.num_programs(1).to(tl.int64) * num_rows
    tl.store(statistics + row, row_delta)

    q += batch * q_batch + head * q_head + start_row * q_row
    grad_out += batch * grad_batch + head * grad_head + start_row * grad_row
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    row_lo = tl.load(lo + start + row)
    row_hi = tl.load(hi + start + row)
    sees = row_lo < row_hi
    q_tile = load_tile(
        q + tile_offsets(q_row, ROWS, D_PADDED), sees, ROWS, D_PADDED, D, CHECK_ROWS=True
    )
    grad_tile = load_tile(
        *(grad_out + tile_offsets(grad_row, ROWS, E_PADDED), sees, ROWS, E_PADDED, E),
        CHECK_ROWS=True,
    )
    acc = tl.zeros([ROWS, D_PADDED], dtype=tl.float32)
    acc = _add_queries(
        *(acc, q_tile, grad_tile, base, row_delta, k, v, k_described, v_described, batch, group),
        *(k_row, v_row, row_lo, row_hi, lo, hi, start, num_queries, key_position, runs),
        *(tl.load(entry + 1), tl.load(entry + 2), scale, inner_scale),
        *(D, E, D_PADDED, E_PADDED, SCORES, INTERVALS, BLOCK, ROWS, KEYS, DESCRIBED, AHEAD),
        MASKED=False,
    )
    acc = _add_queries(
        *(acc, q_tile, grad_tile, base, row_delta, k, v, k_described, v_described, batch, group),
        *(k_row, v_row, row_lo, row_hi, lo, hi, start, num_queries, key_position, runs),
        *(tl.load(entry + 3), tl.load(entry + 4), scale, inner_scale),
        *(D, E, D_PADDED, E_PADDED, SCORES, INTERVALS, BLOCK, ROWS, KEYS, DESCRIBED, AHEAD),
        MASKED=True,
    )
    dq += batch * dq_batch + head * dq_head + start_row * dq_row
    dq_pointers = dq + tile_offsets(dq_row, ROWS, D_PADDED)
    store_tile(dq_pointers, acc * softmax_scale, rows_left, ROWS, D_PADDED, D)


@triton.jit
def _add_queries(
    acc: tl.tensor, q_tile: tl.tensor, grad_tile: tl.tensor, base: tl.tensor, row_delta: tl.tensor,
    k: tl.tensor, v: tl.tensor,
    k_described: tl.tensor, v_described: tl.tensor,
    batch: tl.tensor, group: tl.tensor, k_row: tl.tensor, v_row: tl.tensor,
    row_lo: tl.tensor, row_hi: tl.tensor,
    lo: tl.tensor, hi: tl.tensor, query_start: tl.tensor,
    num_queries: tl.tensor, key_position: tl.tensor, runs: tl.tensor, run: tl.tensor,
    num_blocks: tl.tensor,
    scale: tl.tensor, inner_scale: tl.tensor,
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    SCORES: tl.constexpr, INTERVALS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    PIECES: tl.constexpr = BLOCK // KEYS
    key = tl.arange(0, KEYS)
    at, end = first_piece(runs, run, PIECES)
    for _ in tl.range(num_blocks * PIECES):
        start = at * KEYS
        real = key >= 0
        if MASKED:
            position = tl.load(key_position + start + key)
            real = position >= 0
        k_tile = load_rows(
            *(k, k_described, batch, start, group, k_row, real, KEYS, D_PADDED, D),
            *(MASKED, DESCRIBED),
        )
        v_tile = load_rows(
            *(v, v_described, batch, start, group, v_row, real, KEYS, E_PADDED, E),
            *(MASKED, DESCRIBED),
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        scores = scores_of(scores, inner_scale, SCORES)
        if AHEAD:
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        p = tl.exp2(scores * scale - base[:, None])
        if MASKED:
            at_key = position[None, :]
            visible = (row_lo[:, None] <= at_key) & (at_key < row_hi[:, None])
            for interval in tl.static_range(1, INTERVALS):
                more_lo = row_bounds(lo, interval, query_start, num_queries, BLOCK, ROWS)
                more_hi = row_bounds(hi, interval, query_start, num_queries, BLOCK, ROWS)
                visible |= (more_lo[:, None] <= at_key) & (at_key < more_hi[:, None])
            p = tl.where(visible, p, 0.0)
        if not AHEAD:
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None])
        if SCORES == CAPPED:
            ds = ds * (1.0 - scores * scores)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        run, at, end = next_piece(runs, run, at, end, PIECES)
    return acc
