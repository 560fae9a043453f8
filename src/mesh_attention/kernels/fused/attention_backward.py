"""Attention backward for any row ranges, in two kernels: dQ, then dK and dV.

Neither uses atomics: sums are made in one order, so results are the same every time. The first
takes the log-sum-exp and delta of the *whole* softmax, of which the block is a part, and leaves
them for the second in the form and order that its inner loop wants: (2, B, H, whole blocks of
rows), the log-sum-exp to the base of two.
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
    own_block,
    scores_of,
    store_tile,
    visible,
    whole_blocks,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNSEEN = tl.constexpr(1e30)  # two to the power of any score less this is zero


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_queries_kernel(
    q, k, v, k_described, v_described, grad_out, lse, delta, statistics, dq,
    lo, hi, key_position, runs, table,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    grad_batch, grad_row, grad_head, lse_batch, lse_row, lse_head,
    delta_batch, delta_row, delta_head, dq_batch, dq_row, dq_head,
    num_queries, num_heads, scale, inner_scale, softmax_scale,
    REPEATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, SCORES: tl.constexpr, INTERVALS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """If `DESCRIBED` there are descriptors of `k` and `v` too, in tiles of `KEYS` rows."""
    entry, start, batch, head = own_block(table, num_heads, BLOCK, ROWS)
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
    q_tile = load_tile(q, q_row, sees, ROWS, D_PADDED, D, CHECK_ROWS=True)
    grad_tile = load_tile(grad_out, grad_row, sees, ROWS, E_PADDED, E, CHECK_ROWS=True)
    acc = tl.zeros([ROWS, D_PADDED], dtype=tl.float32)
    PIECES: tl.constexpr = BLOCK // KEYS
    key = tl.arange(0, KEYS)
    for MASKED in tl.static_range(2):
        run = tl.load(entry + (1 + 2 * MASKED))
        num_blocks = tl.load(entry + (2 + 2 * MASKED))
        at, end = first_piece(runs, run, PIECES)
        for _ in tl.range(num_blocks * PIECES):
            first_key = at * KEYS
            real = key >= 0
            if MASKED:
                position = tl.load(key_position + first_key + key)
                real = position >= 0
            k_tile = load_rows(
                k, k_described, batch, first_key, group, k_row, real,
                KEYS, D_PADDED, D, MASKED, DESCRIBED,
            )  # fmt: skip
            v_tile = load_rows(
                v, v_described, batch, first_key, group, v_row, real,
                KEYS, E_PADDED, E, MASKED, DESCRIBED,
            )  # fmt: skip
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            scores = scores_of(scores, inner_scale, SCORES)
            p = tl.exp2(scores * scale - base[:, None])
            if MASKED:
                seen = visible(
                    row_lo, row_hi, position[None, :], lo, hi, start, num_queries,
                    INTERVALS, BLOCK, ROWS, KEY_DIM=1,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - row_delta[:, None])
            if SCORES == CAPPED:
                ds = ds * (1.0 - scores * scores)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
            run, at, end = next_piece(runs, run, at, end, PIECES)
    dq += batch * dq_batch + head * dq_head + start_row * dq_row
    store_tile(dq, dq_row, acc * softmax_scale, rows_left, ROWS, D_PADDED, D)


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_keys_kernel(
    q, k, v, grad_out, q_described, grad_described, statistics, dk, dv,
    lo, hi, key_position, runs, table,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    grad_batch, grad_row, grad_head, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    num_queries, num_keys, num_groups, scale, inner_scale, softmax_scale,
    REPEATS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, SCORES: tl.constexpr, INTERVALS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A program takes `KEYS` keys, and of the queries `ROWS` at once, for one head of the group
    after another. If `DESCRIBED` there are descriptors of `q` and `grad_out` too, in tiles of
    `ROWS` rows. With `AHEAD` the product of dO and values is begun before the exponentials, so that
    both run at once."""
    entry, start, batch, group = own_block(table, num_groups, BLOCK, KEYS)
    start_key = start.to(tl.int64)
    keys_left = num_keys - start
    key = tl.arange(0, KEYS)

    k += batch * k_batch + group * k_head + start_key * k_row
    v += batch * v_batch + group * v_head + start_key * v_row
    # Positions begin at zero, so nobody sees padding or what is past the last key.
    position = tl.load(key_position + start + key)
    real = position >= 0
    k_tile = load_tile(k, k_row, real, KEYS, D_PADDED, D, CHECK_ROWS=True)
    v_tile = load_tile(v, v_row, real, KEYS, E_PADDED, E, CHECK_ROWS=True)
    dk_acc = tl.zeros([KEYS, D_PADDED], dtype=tl.float32)
    dv_acc = tl.zeros([KEYS, E_PADDED], dtype=tl.float32)
    num_rows = whole_blocks(num_queries, BLOCK)
    num_statistics = tl.num_programs(1).to(tl.int64) * REPEATS * num_rows
    PIECES: tl.constexpr = BLOCK // ROWS
    row = tl.arange(0, ROWS)
    for repeat in tl.range(REPEATS):
        head = group * REPEATS + repeat
        q_base = q + batch * q_batch + head * q_head
        grad_base = grad_out + batch * grad_batch + head * grad_head
        base = statistics + (batch * num_groups * REPEATS + head) * num_rows
        delta = base + num_statistics
        for MASKED in tl.static_range(2):
            run = tl.load(entry + (1 + 2 * MASKED))
            num_blocks = tl.load(entry + (2 + 2 * MASKED))
            at, end = first_piece(runs, run, PIECES)
            for _ in tl.range(num_blocks * PIECES):
                # Scores have keys as rows: p and ds are left operands without being transposed.
                first_row = at * ROWS
                inside = row >= 0
                if MASKED:
                    row_lo = tl.load(lo + first_row + row)
                    row_hi = tl.load(hi + first_row + row)
                    inside = row_lo < row_hi
                q_tile = load_rows(
                    q_base, q_described, batch, first_row, head, q_row, inside,
                    ROWS, D_PADDED, D, MASKED, DESCRIBED,
                )  # fmt: skip
                row_base = tl.load(base + first_row + row)
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                scores = scores_of(scores, inner_scale, SCORES)
                grad_tile = load_rows(
                    grad_base, grad_described, batch, first_row, head, grad_row, inside,
                    ROWS, E_PADDED, E, MASKED, DESCRIBED,
                )  # fmt: skip
                if AHEAD:
                    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
                p = tl.exp2(scores * scale - row_base[None, :])
                if MASKED:
                    seen = visible(
                        row_lo, row_hi, position[:, None], lo, hi, first_row, num_queries,
                        INTERVALS, BLOCK, ROWS, KEY_DIM=0,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                p_narrow = p.to(grad_tile.dtype)
                dv_acc = tl.dot(p_narrow, grad_tile, dv_acc, input_precision=PRECISION)
                row_delta = tl.load(delta + first_row + row)
                if not AHEAD:
                    dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
                ds = p * (dp - row_delta[None, :])
                if SCORES == CAPPED:
                    ds = ds * (1.0 - scores * scores)
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
                run, at, end = next_piece(runs, run, at, end, PIECES)
    dk += batch * dk_batch + group * dk_head + start_key * dk_row
    dv += batch * dv_batch + group * dv_head + start_key * dv_row
    store_tile(dk, dk_row, dk_acc * softmax_scale, keys_left, KEYS, D_PADDED, D)
    store_tile(dv, dv_row, dv_acc, keys_left, KEYS, E_PADDED, E)
