"""Sets of token positions as strided runs, and how many (query, key) pairs of two runs are visible.

Layouts give their tokens as runs; planning, counting, verifying and pricing count pairs here.

A run is `count` blocks of `block` consecutive positions, `stride` apart. A contiguous or zigzag
partition is one or two runs of one block; a striped partition is one run of many blocks. Pairs are
counted in closed form, so planning 512K striped tokens costs no more than planning 512.

The formula: write a query as `q0 + m*S + u` and a key as `k0 + m'*S + u'` with the same stride S.
Then `k < q + base` holds exactly when `m' - m <= floor((d + u - u' - 1) / S)` for
`d = q0 + base - k0`. As blocks are no longer than S, the right side takes at most three values; for
each we multiply the number of (m, m') by the number of (u, u'), and both are areas under a
staircase (`_staircase`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.problem.block_pairs import block_pairs, pairs_of_blocks
from mesh_attention.plan.problem.row_ranges import RowRanges

Array = NDArray[np.int64]
_ONE_BLOCK_STRIDE = 1 << 40  # no position can span it: a run of one block has none of its own
_MANY_RUNS = 4  # few are looked at faster one by one
_MOST_BLOCKS = 1 << 14  # of both sides: more are counted by their strides
_FEW_PAIRS = 24  # likewise of pairs of runs
_MOST_AT_ONCE = 1 << 18  # pairs of runs, so that arrays stay in the caches


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of `block` positions, `stride` apart, the first at `start`."""

    start: int
    block: int
    stride: int = 0
    count: int = 1

    @property
    def num_tokens(self) -> int:
        return self.block * self.count

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + (self.count - 1) * self.stride + self.block

    def blocks(self) -> list[tuple[int, int]]:
        return [
            (self.start + m * self.stride, self.start + m * self.stride + self.block)
            for m in range(self.count)
        ]


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Fewer runs of the same positions in the same order. Consecutive runs become one block, and
    blocks at equal distances, such as the same chunk of all ranks, one strided run."""
    joined: list[Run] = []
    for run in runs:
        before = joined[-1] if joined else None
        if before and before.count == run.count == 1 and before.stop == run.start:
            joined[-1] = Run(before.start, before.block + run.block)
        else:
            joined.append(run)
    first, step = joined[0], joined[-1].start - joined[-2].start if len(joined) >= _MANY_RUNS else 0
    even = step >= first.block and all(
        run == Run(first.start + at * step, first.block) for at, run in enumerate(joined)
    )
    return (Run(first.start, first.block, step, len(joined)),) if even else tuple(joined)


def clip_run(run: Run, start: int, stop: int) -> list[Run]:
    """The part of a run inside `start <= position < stop`: at most a cut block at either end."""
    start, stop = max(start, run.start), min(stop, run.stop)
    if start >= stop:
        return []
    if run.count == 1:
        return [Run(start, stop - start)]
    first, into_first = divmod(start - run.start, run.stride)
    last, into_last = divmod(stop - 1 - run.start, run.stride)
    parts: list[Run] = []
    if into_first:  # the first block is cut (or missed, when start lies in the gap after it)
        end = min(run.start + first * run.stride + run.block, stop)
        if start < end:
            parts.append(Run(start, end - start))
        first += 1
    cut_last = into_last < run.block - 1
    whole = last - first + (0 if cut_last else 1)
    if whole > 0:
        parts.append(Run(run.start + first * run.stride, run.block, run.stride, whole))
    if cut_last and last >= first:
        parts.append(Run(run.start + last * run.stride, into_last + 1))
    return parts


def visible_pairs(queries: Sequence[Run], keys: Sequence[Run], rows: RowRanges) -> Array:
    """`result[i, j]` = number of visible pairs between query run i and key run j."""
    result = np.zeros((len(queries), len(keys)), dtype=np.int64)
    if not queries or not keys:
        return result
    strides = {run.stride for run in (*queries, *keys) if run.count > 1}
    if not strides and len(queries) * len(keys) > _FEW_PAIRS:
        blocks = [np.array([(run.start, run.stop) for run in side]) for side in (queries, keys)]
        return block_pairs(blocks[0], blocks[1], rows)
    stride = strides.pop() if len(strides) == 1 else None
    key_parts = _common_stride(list(enumerate(keys)), queries, stride)
    parts: list[tuple[int, Run]] = []
    segments: list[int] = []  # of each part
    for i, run in enumerate(queries):
        for at in rows.segments_between(run.start, run.stop):
            segment = rows.segments[at]
            inside = [(i, part) for part in clip_run(run, segment.start, segment.stop)]
            others = [run for _, run in key_parts]
            cut = _common_stride(inside, others, stride) if inside else []
            parts += cut
            segments += [at] * len(cut)
    if len(parts) * len(key_parts) <= _FEW_PAIRS:
        for (i, own), at in zip(parts, segments, strict=True):
            for j, other in key_parts:
                result[i, j] += sum(
                    _pairs_below(own, other, line.hi, line.hi_slope)
                    - _pairs_below(own, other, line.lo, line.lo_slope)
                    for line in rows.segments[at].intervals
                )
        return result
    k_index, k = _columns(key_parts)
    most = max(1, _MOST_AT_ONCE // len(key_parts))
    for first in range(0, len(parts), most):
        q_index, q = _columns(parts[first : first + most])
        pairs = np.zeros((len(q_index), len(k_index)), dtype=np.int64)
        for lo, lo_slope, hi, hi_slope in rows.lines(np.array(segments[first : first + most])):
            pairs += _below(q, k, hi, hi_slope)
            pairs -= _below(q, k, lo, lo_slope)
        by_key = np.zeros((len(keys), len(q_index)), dtype=np.int64)
        np.add.at(by_key, k_index, pairs.T)
        np.add.at(result, q_index, by_key.T)
    return result


def pairs_of_parts(
    queries: Sequence[Sequence[Run]], keys: Sequence[Sequence[Run]], rows: RowRanges
) -> Array:
    """`result[i, j]` = number of visible pairs between all runs of part i and all of part j; no
    part may be empty."""
    pairs = visible_pairs(list(chain(*queries)), list(chain(*keys)), rows)
    for axis, parts in enumerate((queries, keys)):
        starts = list(accumulate(map(len, parts), initial=0))[:-1]
        pairs = np.add.reduceat(pairs, starts, axis=axis)
    return pairs


def num_visible(queries: Sequence[Run], keys: Sequence[Run], rows: RowRanges) -> int:
    """All visible pairs of these runs. Many runs of few blocks are not counted pair by pair: the
    keys below a line are a sum over queries of a piecewise linear function."""
    few = len(queries) * len(keys) <= _FEW_PAIRS
    if few or sum(run.count for run in (*queries, *keys)) > _MOST_BLOCKS:
        return int(visible_pairs(queries, keys, rows).sum())
    if not queries or not keys:
        return 0
    q, k = (sorted(x for run in side for x in run.blocks()) for side in (queries, keys))
    return pairs_of_blocks(np.array(q, dtype=np.int64), np.array(k, dtype=np.int64), rows)


def _common_stride(
    runs: list[tuple[int, Run]], others: Sequence[Run], stride: int | None
) -> list[tuple[int, Run]]:
    """Runs cut so that no block is longer than the stride, which `_below_diagonal` needs.

    Where both sides have only one stride, a long block becomes blocks without gaps. Otherwise runs
    with another stride than the other side's, or too short for its blocks, are cut into blocks."""
    if stride is not None:
        return [(i, part) for i, run in runs for part in _with_stride(run, stride)]
    if all(run.count == 1 for _, run in runs):
        return runs
    strides = {run.stride for run in others if run.count > 1}
    longest = max(run.block for run in others)
    if all(r.count == 1 or (strides <= {r.stride} and longest <= r.stride) for _, r in runs):
        return runs
    return [(i, Run(a, b - a)) for i, run in runs for a, b in run.blocks()]


def _with_stride(run: Run, stride: int) -> list[Run]:
    if run.count > 1 or run.block <= stride:
        return [run]
    whole, rest = divmod(run.block, stride)
    parts = [Run(run.start, stride, stride if whole > 1 else 0, whole)]
    return parts + [Run(run.stop - rest, rest)] * bool(rest)


Columns = tuple[Array, Array, Array, Array]  # start, block, stride and count of runs


def _columns(runs: list[tuple[int, Run]]) -> tuple[Array, Columns]:
    """The index of each run, and the runs as arrays."""
    rows = [(i, r.start, r.block, _stride(r.stride, r.count), r.count) for i, r in runs]
    index, start, block, stride, count = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return index, (start, block, stride, count)


def _stride(stride: int, count: int) -> int:
    return stride if count > 1 else _ONE_BLOCK_STRIDE


def _below(q: Columns, k: Columns, base: Array, slope: Array) -> Array:
    """Pairs with `key < base + slope * query`, for every query run against every key run. Each
    query run has its own line."""
    below = np.empty((len(q[0]), len(k[0])), dtype=np.int64)
    for which, count in ((slope == 0, _below_level), (slope != 0, _below_diagonal)):
        if which.any():
            start, block, stride, number = (column[which, None] for column in q)
            runs = (start, block, stride, number), k
            below[which] = count(*runs, base[which, None], np.minimum, np.maximum)
    return below


def _pairs_below(q: Run, k: Run, base: int, slope: int) -> int:
    """The same of two runs and one line: plain numbers take far less time than small arrays."""
    count = _below_diagonal if slope else _below_level
    runs = [(r.start, r.block, _stride(r.stride, r.count), r.count) for r in (q, k)]
    pairs: int = count(runs[0], runs[1], base, min, max)
    return pairs


# The three formulas below take numbers with `min` and `max`, or arrays with those of numpy.
def _below_level(q: Any, k: Any, base: Any, low: Any, high: Any) -> Any:
    _, q_block, _, q_count = q
    k0, k_block, k_stride, k_count = k
    into = high(base - k0, 0)
    whole = into // k_stride
    # Past the last block `whole` is too large, and then the first term is the smaller one.
    seen = low(k_count * k_block, whole * k_block + low(into - whole * k_stride, k_block))
    return q_block * q_count * seen


def _below_diagonal(q: Any, k: Any, base: Any, low: Any, high: Any) -> Any:
    q0, q_block, q_stride, q_count = q
    k0, k_block, k_stride, k_count = k
    stride = low(q_stride, k_stride)
    d = q0 + base - k0
    shift = (d - k_block) // stride  # the smallest value of the right side
    total = inside_before = 0
    for limit in (shift, shift + 1, shift + 2):
        inside = _staircase(q_block, k_block, (limit + 1) * stride - d, low, high)
        total = total + _staircase(k_count, q_count, limit, low, high) * (inside - inside_before)
        inside_before = inside
    return total


def _staircase(x_size: Any, y_size: Any, limit: Any, low: Any, high: Any) -> Any:
    """Number of pairs `0 <= x < x_size, 0 <= y < y_size` with `x - y <= limit`."""
    z = low(high(limit + y_size, 0), x_size + y_size)
    x, y = high(z - x_size, 0), high(z - y_size, 0)
    return (z * (z + 1) - x * (x + 1) - y * (y + 1)) // 2
