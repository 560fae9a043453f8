"""Attention backward for any row ranges, second of two kernels: dK and dV.

It runs after that of `attention_backward.py`, from which it has its log-sum-exp and delta.
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

_TABLE_COLUMNS = tl.constexpr(5)


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_keys_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, grad_out: tl.tensor,
    q_described: tl.tensor, grad_described: tl.tensor,
    statistics: tl.tensor, dk: tl.tensor, dv: tl.tensor,
    lo: tl.tensor, hi: tl.tensor, key_position: tl.tensor, runs: tl.tensor, table: tl.tensor,
    q_batch: tl.tensor, q_row: tl.tensor, q_head: tl.tensor,
    k_batch: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    v_batch: tl.tensor, v_row: tl.tensor, v_head: tl.tensor,
    grad_batch: tl.tensor, grad_row: tl.tensor, grad_head: tl.tensor,
    dk_batch: tl.tensor, dk_row: tl.tensor, dk_head: tl.tensor,
    dv_batch: tl.tensor, dv_row: tl.tensor, dv_head: tl.tensor,
    num_queries: tl.tensor, num_keys: tl.tensor, num_groups: tl.tensor,
    scale: tl.tensor, inner_scale: tl.tensor, softmax_scale: tl.tensor,
    REPEATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, SCORES: tl.constexpr, INTERVALS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """A program takes `KEYS` keys, and of the queries `ROWS` at once, for one head of the group
    after another. If `DESCRIBED` there are descriptors of `q` and `grad_out` too, in tiles of
    `ROWS` rows."""
    SHARES: tl.constexpr = BLOCK // KEYS
    entry = table + tl.program_id(0) // SHARES * _TABLE_COLUMNS
    start = tl.load(entry) * BLOCK + tl.program_id(0) % SHARES * KEYS
    batch = (tl.program_id(1) // num_groups).to(tl.int64)
    group = (tl.program_id(1) % num_groups).to(tl.int64)
    start_key = start.to(tl.int64)
    keys_left = num_keys - start
    key = tl.arange(0, KEYS)

    k += batch * k_batch + group * k_head + start_key * k_row
    v += batch * v_batch + group * v_head + start_key * v_row
    # Positions begin at zero, so nobody sees padding or what is past the last key.
    position = tl.load(key_position + start + key)
    real = position >= 0
    k_tile = load_tile(
        k + tile_offsets(k_row, KEYS, D_PADDED), real, KEYS, D_PADDED, D, CHECK_ROWS=True
    )
    v_tile = load_tile(
        v + tile_offsets(v_row, KEYS, E_PADDED), real, KEYS, E_PADDED, E, CHECK_ROWS=True
    )
    dk_acc = tl.zeros([KEYS, D_PADDED], dtype=tl.float32)
    dv_acc = tl.zeros([KEYS, E_PADDED], dtype=tl.float32)
    num_rows = whole_blocks(num_queries, BLOCK)
    num_statistics = tl.num_programs(1).to(tl.int64) * REPEATS * num_rows
    for repeat in tl.range(REPEATS):
        head = group * REPEATS + repeat
        q_base = q + batch * q_batch + head * q_head
        grad_base = grad_out + batch * grad_batch + head * grad_head
        base = statistics + (batch * num_groups * REPEATS + head) * num_rows
        dk_acc, dv_acc = _add_keys(
            *(dk_acc, dv_acc, k_tile, v_tile, q_base, grad_base, q_described, grad_described),
            *(batch, head, base, base + num_statistics, q_row, grad_row),
            *(lo, hi, position, num_queries, runs),
            *(tl.load(entry + 1), tl.load(entry + 2), scale, inner_scale),
            *(D, E, D_PADDED, E_PADDED, SCORES, INTERVALS, BLOCK, ROWS, DESCRIBED, AHEAD),
            MASKED=False,
        )
        dk_acc, dv_acc = _add_keys(
            *(dk_acc, dv_acc, k_tile, v_tile, q_base, grad_base, q_described, grad_described),
            *(batch, head, base, base + num_statistics, q_row, grad_row),
            *(lo, hi, position, num_queries, runs),
            *(tl.load(entry + 3), tl.load(entry + 4), scale, inner_scale),
            *(D, E, D_PADDED, E_PADDED, SCORES, INTERVALS, BLOCK, ROWS, DESCRIBED, AHEAD),
            MASKED=True,
        )
    dk += batch * dk_batch + group * dk_head + start_key * dk_row
    dv += batch * dv_batch + group * dv_head + start_key * dv_row
    dk_pointers = dk + tile_offsets(dk_row, KEYS, D_PADDED)
    dv_pointers = dv + tile_offsets(dv_row, KEYS, E_PADDED)
    store_tile(dk_pointers, dk_acc * softmax_scale, keys_left, KEYS, D_PADDED, D)
    store_tile(dv_pointers, dv_acc, keys_left, KEYS, E_PADDED, E)


@triton.jit
def _add_keys(
    dk: tl.tensor, dv: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, q: tl.tensor,
    grad_out: tl.tensor,
    q_described: tl.tensor, grad_described: tl.tensor,
    batch: tl.tensor, head: tl.tensor, base: tl.tensor, delta: tl.tensor, q_row: tl.tensor,
    grad_row: tl.tensor,
    lo: tl.tensor, hi: tl.tensor, position: tl.tensor,
    num_queries: tl.tensor, runs: tl.tensor, run: tl.tensor, num_blocks: tl.tensor,
    scale: tl.tensor, inner_scale: tl.tensor,
    D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr, E_PADDED: tl.constexpr,
    SCORES: tl.constexpr, INTERVALS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr, AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores stand with keys as rows: so p and ds are left operands without being transposed."""
    PIECES: tl.constexpr = BLOCK // ROWS
    row = tl.arange(0, ROWS)
    at, end = first_piece(runs, run, PIECES)
    for _ in tl.range(num_blocks * PIECES):
        start = at * ROWS
        inside = row >= 0
        if MASKED:
            row_lo = tl.load(lo + start + row)
            row_hi = tl.load(hi + start + row)
            inside = row_lo < row_hi
        q_tile = load_rows(
            *(q, q_described, batch, start, head, q_row, inside, ROWS, D_PADDED, D),
            *(MASKED, DESCRIBED),
        )
        row_base = tl.load(base + start + row)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        scores = scores_of(scores, inner_scale, SCORES)
        grad_tile = load_rows(
            *(grad_out, grad_described, batch, start, head, grad_row, inside, ROWS, E_PADDED, E),
            *(MASKED, DESCRIBED),
        )
        if AHEAD:
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        p = tl.exp2(scores * scale - row_base[None, :])
        if MASKED:
            at_key = position[:, None]
            visible = (row_lo[None, :] <= at_key) & (at_key < row_hi[None, :])
            for interval in tl.static_range(1, INTERVALS):
                more_lo = row_bounds(lo, interval, start, num_queries, BLOCK, ROWS)
                more_hi = row_bounds(hi, interval, start, num_queries, BLOCK, ROWS)
                visible |= (more_lo[None, :] <= at_key) & (at_key < more_hi[None, :])
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        row_delta = tl.load(delta + start + row)
        if not AHEAD:
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        if SCORES == CAPPED:
            ds = ds * (1.0 - scores * scores)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
        run, at, end = next_piece(runs, run, at, end, PIECES)
    return dk, dv
