"""Attention forward for any row ranges, in one kernel: online softmax over the visible blocks.

A program takes some rows of one head. It goes over the blocks of keys that they see whole without
looking at the mask, then over those that it masks; `range_blocks.py` makes the lists of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.fused.attention_tiles import (
    LENGTHS,
    PRECISION,
    first_piece,
    load_rows,
    load_tile,
    next_piece,
    own_block,
    scores_of,
    store_tile,
    visible,
)

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward_kernel(
    q, k, v, k_described, v_described, out, lse, lo, hi, key_position, runs, table,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, num_queries, num_heads, scale, inner_scale,
    REPEATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, SCORES: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`lse` is (B, H, S), contiguous. If `DESCRIBED` there are descriptors of `k` and `v` too, in
    tiles of `KEYS` rows."""
    entry, start, batch, head = own_block(table, num_heads, BLOCK, ROWS)
    group = head // REPEATS
    start_row = start.to(tl.int64)
    rows_left = num_queries - start

    q += batch * q_batch + head * q_head + start_row * q_row
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    row = tl.arange(0, ROWS)
    inside = row < rows_left
    q_tile = load_tile(q, q_row, inside, ROWS, D_PADDED, D, CHECK_ROWS=True)
    row_lo = tl.load(lo + start + row)
    row_hi = tl.load(hi + start + row)
    acc = tl.zeros([ROWS, E_PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    best = tl.full([ROWS], -float("inf"), dtype=tl.float32)

    # No branch around either list: with one ptxas lets no two matrix products overlap.
    PIECES: tl.constexpr = BLOCK // KEYS
    key = tl.arange(0, KEYS)
    for MASKED in tl.static_range(2):
        run = tl.load(entry + (1 + 2 * MASKED))
        num_pieces = tl.load(entry + (2 + 2 * MASKED)) * PIECES
        at, end = first_piece(runs, run, PIECES)
        for _ in tl.range(num_pieces):
            first_key = at * KEYS
            real = key >= 0
            if MASKED:
                # Positions begin at zero, so nobody sees padding or what is past the last key.
                position = tl.load(key_position + first_key + key)
                real = position >= 0
            run, at, end = next_piece(runs, run, at, end, PIECES)
            k_tile = load_rows(
                k, k_described, batch, first_key, group, k_row, real,
                KEYS, D_PADDED, D, MASKED, DESCRIBED,
            )  # fmt: skip
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            scores = scores_of(scores, inner_scale, SCORES)
            if MASKED:
                seen = visible(
                    row_lo, row_hi, position[None, :], lo, hi, start, num_queries,
                    INTERVALS, BLOCK, ROWS, KEY_DIM=1,
                )  # fmt: skip
                scores = tl.where(seen, scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, 1) * scale)
            base = new_best
            if MASKED:
                # Rows that have seen nothing yet must not compute inf - inf.
                base = tl.where(new_best == -float("inf"), 0.0, new_best)
            p = tl.exp2(scores * scale - base[:, None])
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            v_tile = load_rows(
                v, v_described, batch, first_key, group, v_row, real,
                KEYS, E_PADDED, E, MASKED, DESCRIBED,
            )  # fmt: skip
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            best = new_best

    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    row_lse = tl.where(unseen, -float("inf"), (best + tl.log2(total)) * _LN_2)
    tl.store(lse + tl.program_id(1).to(tl.int64) * num_queries + start + row, row_lse, mask=inside)
    out += batch * out_batch + head * out_head + start_row * out_row
    store_tile(out, out_row, acc / total[:, None], rows_left, ROWS, E_PADDED, E)
