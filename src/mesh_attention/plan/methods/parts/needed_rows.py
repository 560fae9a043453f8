"""Which rows a rank has to work on, by what the mask shows: what must travel, and no more.

With a tile a x b a rank takes the queries of its tile row that see keys of its tile column, and the
keys of its column that those queries see; 1 x n is its own queries and all that they see. All is
found by intervals, for all ranks at once: stretches of positions that ranks own, cut where the mask
bends, show intervals of keys, and those of one tile row are joined. A rank then cuts the intervals
of its own row at the stretches of the owners to know what it receives, and those of all rows at its
own stretches to know what it gives. So its program costs no work for pairs of other ranks, and none
for single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges

Array = NDArray[np.int64]


@lru_cache(maxsize=16)
def _runs_of(layout: Layout) -> Array:
    return layout.all_runs()


def num_stretches(layout: Layout) -> int:
    """Stretches of consecutive positions that the ranks own."""
    return int(_runs_of(layout)[:, 3].sum())


@dataclass(frozen=True, slots=True, eq=False)
class OwnedStretches:
    """Positions `starts..stops` of real tokens lie at `places` and on; by rank, in slot order."""

    starts: Array
    stops: Array
    places: Array

    def __getitem__(self, which: Array) -> OwnedStretches:
        return OwnedStretches(self.starts[which], self.stops[which], self.places[which])


def blocks_of(layout: Layout) -> tuple[Array, Array, Array]:
    """Consecutive positions of one rank, padding too, in order of place: where blocks of them
    begin, their sizes, and their places."""
    table = _runs_of(layout)
    run, turn = expanded(np.zeros(len(table), dtype=np.int64), table[:, 3])
    sizes = table[run, 1]
    return table[run, 0] + turn * table[run, 2], sizes, np.cumsum(sizes) - sizes


@lru_cache(maxsize=16)
def stretches_of(layout: Layout) -> OwnedStretches:
    starts, block, places = blocks_of(layout)
    # What one rank owns in one piece, as the halves in the middle of a zigzag, is one stretch.
    new = np.ones(len(starts), dtype=np.bool_)
    owners = places // layout.slots
    new[1:] = (starts[1:] != (starts + block)[:-1]) | (owners[1:] != owners[:-1])
    at = np.flatnonzero(new)
    starts, places = starts[at], places[at]
    stops = np.minimum(starts + np.add.reduceat(block, at), layout.num_tokens)
    return OwnedStretches(starts, stops, places)[np.flatnonzero(starts < stops)]


class SeenParts(NamedTuple):
    """Queries `low..high` of one stretch and one segment of the mask, with an interval of keys."""

    stretch: Array  # its index
    low: Array
    high: Array  # the last
    lo: Array
    lo_slope: Array
    hi: Array
    hi_slope: Array


def seen_parts(starts: Array, stops: Array, rows: RowRanges) -> SeenParts:
    index, at, low, high = _cut(starts, stops, *rows.edges)
    parts = [SeenParts(index, low, high - 1, *lines) for lines in rows.lines(at)]
    if len(parts) == 1:
        return parts[0]
    return SeenParts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@lru_cache(maxsize=8)  # what is counted to choose a layout is what its plan needs
def parts_of(layout: Layout, rows: RowRanges) -> SeenParts:
    """Of the queries of all ranks."""
    own = stretches_of(layout)
    return seen_parts(own.starts, own.stops, rows)


def keys_seen(p: SeenParts) -> tuple[Array, Array, Array]:
    """Intervals of keys that stretches of queries see, each with the index of its stretch; some
    are empty, and some meet.

    The ends of an interval are lines on a segment of the mask, and never fall there: the first and
    the last query of a segment bound what all in between see.
    """
    return p.stretch, p.lo + p.lo_slope * p.low, p.hi + p.hi_slope * p.high


def queries_seeing(p: SeenParts, keys: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Intervals of these queries that see keys of some stretches, which are disjoint and in order;
    each with the index of the stretch of keys. Some are empty, and some meet."""
    first = np.searchsorted(keys[1], p.lo + p.lo_slope * p.low, side="right")
    last = np.searchsorted(keys[0], p.hi + p.hi_slope * p.high, side="left")
    at, index = expanded(first, last)
    _, low, high, lo, lo_slope, hi, hi_slope = (column[at] for column in p)
    begin, end = keys[0][index], keys[1][index]
    # A line of slope 0 bounds no query here: where it would, all of the part sees nothing.
    none = ((lo_slope == 0) & (lo >= end)) | ((hi_slope == 0) & (hi <= begin))
    low = np.where(hi_slope > 0, np.maximum(low, begin - hi + 1), low)
    high = np.where(lo_slope > 0, np.minimum(high, end - lo - 1), high)
    # Nor do queries see anything where their interval is empty.
    low = np.where(hi_slope > lo_slope, np.maximum(low, lo - hi + 1), low)
    high = np.where(lo_slope > hi_slope, np.minimum(high, hi - lo - 1), high)
    none |= (lo_slope == hi_slope) & (lo >= hi)
    return index, low, np.where(none, low, high + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that one rank gets from another or gives to it: stretches of `size` rows that begin at a
    slot of their owner, in order of position."""

    ranks: Array  # the other rank
    slots: Array
    sizes: Array


class SeenRows:
    """The rows of one side that ranks work on, as intervals of positions.

    Ranks lie in a grid. All of a *line* of it work on the same positions, each on those that ranks
    of its own place in the lines own. An interval of line l is kept as `l * stride` and positions,
    so that those of all lines can be sorted, joined and searched together.
    """

    def __init__(
        self,
        layout: Layout,
        grid: tuple[Array, Array],
        intervals: tuple[Array, Array, Array],
    ) -> None:
        """`grid`: the line of each rank, and its place there; `intervals`: line and ends."""
        self._layout = layout
        self._lines, self._places = grid
        self._ranks = np.empty((self._lines.max() + 1, self._places.max() + 1), dtype=np.int64)
        self._ranks[grid] = np.arange(layout.num_ranks)
        self._stride = layout.num_tokens + 1  # intervals of two lines never touch
        line, lo, hi = intervals
        some = lo < hi
        base = line[some] * self._stride
        self._lo, self._hi = _joined(base + lo[some], base + hi[some])
        owned = stretches_of(layout)
        self._owned = owned[np.argsort(owned.starts, kind="stable")]
        self._owners = self._owned.places // layout.slots

    @cached_property
    def travels(self) -> bool:
        """Does any rank work on a row that it does not own? Every position belongs to one place, so
        all that is not taken by its owner is."""
        line = self._lines[self._owners] * self._stride
        order = np.argsort(line + self._owned.starts)
        starts, stops = ((line + edge)[order] for edge in (self._owned.starts, self._owned.stops))
        _, _, low, high = _cut(self._lo, self._hi, starts, stops)
        return bool((high - low).sum() < (self._hi - self._lo).sum())

    def tokens_between(self) -> Array:
        """How many rows of each owner each rank needs, [user, owner]; own ones are among them."""
        ranks, owned = self._layout.num_ranks, self._owned
        line, lo = np.divmod(self._lo, self._stride)
        index, at, low, high = _cut(lo, lo + self._hi - self._lo, owned.starts, owned.stops)
        owners = self._owners[at]
        pairs = self._ranks[line[index], self._places[owners]] * ranks + owners
        found = np.bincount(pairs, weights=high - low, minlength=ranks * ranks)
        return found.astype(np.int64).reshape(ranks, ranks)

    def received(self, rank: int) -> Rows:
        """What a rank works on, by owner; its own rows are among it."""
        base = self._lines[rank] * self._stride
        first, last = np.searchsorted(self._lo, (base, base + self._stride)).tolist()
        lo, hi = self._lo[first:last] - base, self._hi[first:last] - base
        near = np.flatnonzero(self._places[self._owners] == self._places[rank])
        owned = self._owned[near]
        index, at, low, high = _cut(lo, hi, owned.starts, owned.stops)
        return self._rows(self._owners[near[at]], owned[at], first + index, low, high)

    def given(self, rank: int) -> Rows:
        """What others work on of a rank's rows, by user; what it does itself is among it."""
        own = self._owned[np.flatnonzero(self._owners == rank)]
        line, lo = np.divmod(self._lo, self._stride)
        index, at, low, high = _cut(lo, lo + self._hi - self._lo, own.starts, own.stops)
        return self._rows(self._ranks[line[index], self._places[rank]], own[at], index, low, high)

    def _rows(
        self, ranks: Array, within: OwnedStretches, interval: Array, low: Array, high: Array
    ) -> Rows:
        """Those that follow each other on both sides are one: in the slots of the owner and, where
        one ends an interval and the next one begins the next, in the rows of the user."""
        slots, sizes = (within.places + low - within.starts) % self._layout.slots, high - low
        begin = self._lo[interval] % self._stride
        end = begin + (self._hi - self._lo)[interval]
        follows = (ranks[1:] == ranks[:-1]) & (slots[1:] == (slots + sizes)[:-1])
        follows &= (interval[1:] == interval[:-1] + 1) & (high == end)[:-1] & (low == begin)[1:]
        first = np.flatnonzero(np.append(True, ~follows)[: len(ranks)])
        sizes = np.add.reduceat(sizes, first) if len(first) else sizes
        return Rows(ranks[first], slots[first], sizes)


def seen_keys(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: Tile | None = None
) -> SeenRows:
    """Keys of a rank's tile column that queries of its tile row see; without a tile, all that its
    own queries see."""
    return _seen_keys(q_layout, kv_layout, rows, tile.a if tile else 1)


@lru_cache(maxsize=4)
def _seen_keys(q_layout: Layout, kv_layout: Layout, rows: RowRanges, columns: int) -> SeenRows:
    row, column = _grid(q_layout, columns)
    index, lo, hi = keys_seen(parts_of(q_layout, rows))
    owners = stretches_of(q_layout).places[index] // q_layout.slots
    return SeenRows(kv_layout, (row, column), (row[owners], lo, hi))


def seen_queries(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: Tile | None = None
) -> SeenRows:
    """Queries of a rank's tile row that see keys of its tile column."""
    row, column = _grid(q_layout, tile.a if tile else 1)
    keys = stretches_of(kv_layout)
    if tile is None or tile.a == 1:
        columns = np.zeros(1, dtype=np.int64)
        edges = (columns, columns + kv_layout.num_tokens)
    else:
        keys = keys[np.argsort(keys.starts, kind="stable")]
        columns = column[keys.places // kv_layout.slots]
        edges = (keys.starts, keys.stops)
    index, lo, hi = queries_seeing(parts_of(q_layout, rows), edges)
    return SeenRows(q_layout, (column, row), (columns[index], lo, hi))


def _grid(layout: Layout, columns: int) -> tuple[Array, Array]:
    """Row and column of each rank."""
    row, column = np.divmod(np.arange(layout.num_ranks), columns)
    return row, column


def expanded(first: Array, last: Array) -> tuple[Array, Array]:
    """All pairs (i, j) with `first[i] <= j < last[i]`."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    begun = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - begun[index] + first[index]


def _joined(lo: Array, hi: Array) -> tuple[Array, Array]:
    """The union of intervals, in order."""
    order = np.argsort(lo, kind="stable")
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    new = np.ones(len(lo), dtype=np.bool_)
    new[1:] = lo[1:] > reach[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(lo)) - 1
    return lo[first], reach[last] if len(first) else reach


def _cut(lo: Array, hi: Array, starts: Array, stops: Array) -> tuple[Array, Array, Array, Array]:
    """The parts of intervals inside stretches, which are disjoint and in order: the index of the
    interval and of the stretch, and the ends of the part."""
    first = np.searchsorted(stops, lo, side="right")
    index, at = expanded(first, np.searchsorted(starts, hi, side="left"))
    return index, at, np.maximum(lo[index], starts[at]), np.minimum(hi[index], stops[at])


def pairs_of_ranks(layout: Layout, rows: RowRanges) -> NDArray[np.float64]:
    """Visible pairs of the queries of each rank."""
    p = parts_of(layout, rows)
    slope = p.hi_slope - p.lo_slope
    twice = (p.high + 1 - p.low) * np.maximum(2 * (p.hi - p.lo) + slope * (p.low + p.high), 0)
    rank = stretches_of(layout).places[p.stretch] // layout.slots
    return np.bincount(rank, weights=twice, minlength=layout.num_ranks) / 2
