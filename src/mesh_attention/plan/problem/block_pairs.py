"""Visible pairs of blocks: stretches of consecutive positions, as arrays of their starts and stops.

Where layouts have no strides their tokens are a few blocks a rank. On a segment of a mask a query
sees the keys between two lines, so the pairs of two blocks are sums of piecewise linear functions,
which need no look at single queries. `runs.py` counts pairs of any runs, and asks here for these.
"""

from __future__ import annotations

import numpy as np

from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.spans import Array, cut

_MOST_AT_ONCE = 1 << 16  # pairs of a part and an edge, so that arrays stay in the caches


def block_pairs(q: Array, k: Array, rows: RowRanges) -> Array:
    """`result[i, j]` = number of visible pairs between block i of queries and block j of keys."""
    order = np.argsort(q[:, 0])  # queries near each other see keys near each other
    of, at, low, high = cut(q[order, 0], q[order, 1], *rows.edges)  # parts of blocks in segments
    edges, places = np.unique(k, return_inverse=True)
    starts, stops = places.reshape(k.shape).T
    result = np.zeros((len(q), len(k)), dtype=np.int64)
    most = max(1, _MOST_AT_ONCE // len(edges))
    for first in range(0, len(of), most):
        some = slice(first, first + most)
        lines = rows.lines(at[some])
        near = _edges_near(low[some], high[some], lines, edges)
        above = np.zeros((len(of[some]), near.stop - near.start), dtype=np.int64)
        for lo, lo_slope, hi, hi_slope in lines:
            above += _keys_above(low[some], high[some], hi, hi_slope, edges[near])
            above -= _keys_above(low[some], high[some], lo, lo_slope, edges[near])
        blocks, begins = np.unique(of[some], return_index=True)
        by_block = np.add.reduceat(above, begins)
        # From edges before these on, as many keys are seen as from the first; none from later ones.
        seen = np.flatnonzero((stops > near.start) & (starts < near.stop - 1))
        ends = (np.clip(x[seen] - near.start, 0, above.shape[1] - 1) for x in (starts, stops))
        from_start, from_stop = (by_block[:, end] for end in ends)
        result[np.ix_(order[blocks], seen)] += from_start - from_stop
    return result


def _edges_near(
    low: Array, high: Array, lines: tuple[tuple[Array, ...], ...], edges: Array
) -> slice:
    """The edges from the last before all keys that these queries see to the first after them."""
    keys = [
        (base + slope * low, base + slope * (high - 1))
        for lo, lo_slope, hi, hi_slope in lines
        for base, slope in ((lo, lo_slope), (hi, hi_slope))
    ]
    first, last = min(int(x.min()) for x, _ in keys), max(int(x.max()) for _, x in keys)
    before = int(np.searchsorted(edges, first, side="right")) - 1
    after = int(np.searchsorted(edges, last))
    return slice(max(before, 0), min(after + 1, len(edges)))


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


def pairs_of_blocks(q: Array, k: Array, rows: RowRanges) -> int:
    """All visible pairs of blocks of queries and of keys: arrays of starts and stops, those of keys
    in order."""
    below = _KeysBelow(k)
    _, at, low, high = cut(q[:, 0], q[:, 1], *rows.edges)
    total = 0
    for lo, lo_slope, hi, hi_slope in rows.lines(at):
        total += below.sum(low, high, hi, hi_slope) - below.sum(low, high, lo, lo_slope)
    return total


class _KeysBelow:
    """How many keys of disjoint blocks, in order, lie below a position; and sums of that."""

    def __init__(self, blocks: Array) -> None:
        # Positions in stretches: one before the first key, then each block and the gap after it.
        self._edges = blocks.ravel()
        self._starts = np.append(self._edges[:1], self._edges)
        self._is_block = np.arange(len(self._starts)) % 2
        sizes = np.diff(self._starts)
        self._before = np.append(0, np.cumsum(sizes * self._is_block[:-1]))  # keys
        self._summed = np.zeros_like(self._starts)  # the sum over all positions before
        self._summed[1:] = np.cumsum(self._sum_within(np.arange(len(sizes)), sizes))

    def sum(self, low: Array, high: Array, base: Array, slope: Array) -> int:
        """Over queries `low <= q < high`: keys below `base + slope * q`."""
        level = slope == 0
        at, into = self._place(base)
        number = self._before[at] + into * self._is_block[at]
        total = int(((high - low) * number)[level].sum())
        up, down = (self._sum_to(edge + base)[~level] for edge in (high, low))
        return total + int((up - down).sum())

    def _place(self, position: Array) -> tuple[Array, Array]:
        """The stretch of a position, and how far into it the position is."""
        at = np.searchsorted(self._edges, position, side="right")
        return at, position - self._starts[at]

    def _sum_to(self, position: Array) -> Array:
        at, into = self._place(position)
        return self._summed[at] + self._sum_within(at, into)

    def _sum_within(self, at: Array, into: Array) -> Array:
        """The sum over the first positions of a stretch, so many as `into`."""
        return self._before[at] * into + self._is_block[at] * (into * (into - 1) // 2)
