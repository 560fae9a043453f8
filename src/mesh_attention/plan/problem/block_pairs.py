"""Visible pairs of blocks: stretches of consecutive positions, as arrays of their starts and stops.

Where layouts have no strides their tokens are a few blocks a rank. On a segment of a mask a query
sees the keys between two lines, so the pairs of two blocks are sums of piecewise linear functions,
which need no look at single queries. `runs.py` counts pairs of any runs, and asks here for these.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.problem.row_ranges import RowRanges

Array = NDArray[np.int64]
_MOST_AT_ONCE = 1 << 16  # pairs of a part and an edge, so that arrays stay in the caches


def block_pairs(q: Array, k: Array, rows: RowRanges) -> Array:
    """`result[i, j]` = number of visible pairs between block i of queries and block j of keys."""
    of, at, low, high = _parts(q, rows)
    edges, places = np.unique(k, return_inverse=True)
    starts, stops = places.reshape(k.shape).T
    result = np.zeros((len(q), len(k)), dtype=np.int64)
    most = max(1, _MOST_AT_ONCE // len(edges))
    for first in range(0, len(of), most):
        some = slice(first, first + most)
        above = np.zeros((len(of[some]), len(edges)), dtype=np.int64)
        for lo, lo_slope, hi, hi_slope in rows.lines(at[some]):
            above += _keys_above(low[some], high[some], hi, hi_slope, edges)
            above -= _keys_above(low[some], high[some], lo, lo_slope, edges)
        blocks, begins = np.unique(of[some], return_index=True)
        by_block = np.add.reduceat(above, begins)
        result[blocks] += by_block[:, starts] - by_block[:, stops]
    return result


def _keys_above(low: Array, high: Array, base: Array, slope: Array, edges: Array) -> Array:
    """Over queries `low <= q < high`: keys from each edge up to `base + slope * q`."""
    ends = np.empty((len(low), len(edges)), dtype=np.int64)
    level = slope == 0
    if level.any():
        keys = np.maximum(base[level, None] - edges, 0)
        ends[level] = (high - low)[level, None] * keys
    if not level.all():
        rising = ~level
        upper, lower = ((edge + base)[rising, None] - edges for edge in (high, low))
        ends[rising] = _numbers_below(upper) - _numbers_below(lower)
    return ends


def _numbers_below(count: Array) -> Array:
    """0 + 1 + ... of so many numbers; none of a negative count."""
    count = np.maximum(count, 0)
    return count * (count - 1) >> 1


def _parts(q: Array, rows: RowRanges) -> tuple[Array, Array, Array, Array]:
    """Blocks of queries cut where segments begin: the block and the segment of each part, and its
    start and stop."""
    starts, stops = rows.edges
    first = np.maximum(np.searchsorted(starts, q[:, 0], side="right") - 1, 0)
    last = np.searchsorted(starts, q[:, 1], side="left")
    count = last - first
    of = np.repeat(np.arange(len(q)), count)
    at = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    low, high = np.maximum(q[of, 0], starts[at]), np.minimum(q[of, 1], stops[at])
    inside = high > low
    return of[inside], at[inside], low[inside], high[inside]


def pairs_of_blocks(q: Array, k: Array, rows: RowRanges) -> int:
    """All visible pairs of blocks of queries and of keys: arrays of starts and stops, those of keys
    in order."""
    below = _KeysBelow(k)
    _, at, low, high = _parts(q, rows)
    total = 0
    for lo, lo_slope, hi, hi_slope in rows.lines(at):
        total += below.sum(low, high, hi, hi_slope) - below.sum(low, high, lo, lo_slope)
    return total


class _KeysBelow:
    """How many keys of disjoint blocks, in order, lie below a position; and sums of that."""

    def __init__(self, blocks: Array) -> None:
        self._starts, size = blocks[:, 0], blocks[:, 1] - blocks[:, 0]
        self._size = size
        self._before = np.concatenate([[0], np.cumsum(size)])  # keys before each block
        # The same summed over all positions up to the start of each block.
        gaps = np.diff(self._starts)
        rising = size[:-1] * (size[:-1] - 1) // 2 + (gaps - size[:-1]) * size[:-1]
        steps = self._before[:-2] * gaps + rising
        self._summed = np.concatenate([[0], np.cumsum(steps)])

    def sum(self, low: Array, high: Array, base: Array, slope: Array) -> int:
        """Over queries `low <= q < high`: keys below `base + slope * q`."""
        level = slope == 0
        total = int(((high - low) * self._number(base))[level].sum())
        up, down = (self._sum_to(edge + base)[~level] for edge in (high, low))
        return total + int((up - down).sum())

    def _number(self, position: Array) -> Array:
        at = np.searchsorted(self._starts, position, side="right") - 1
        inside = np.minimum(position - self._starts[at], self._size[at])
        return np.where(at < 0, 0, self._before[at] + inside)

    def _sum_to(self, position: Array) -> Array:
        """The numbers at all positions before this."""
        at = np.searchsorted(self._starts, position, side="right") - 1
        into, size = position - self._starts[at], self._size[at]
        rising = np.minimum(into, size + 1)
        inside = rising * (rising - 1) // 2 + np.maximum(into - rising, 0) * size
        return np.where(at < 0, 0, self._summed[at] + self._before[at] * into + inside)
