"""Which rows each rank needs under a mask: what must travel, and no more.

Everything is computed on intervals, for all ranks at once: the ranges of positions that ranks own
are cut where the mask bends, each part sees an interval of keys, and the intervals of one tile row
are joined. A rank cuts the intervals of its own row at the owners' ranges to know what it receives,
and the intervals of all rows at its own ranges to know what it gives. So its program costs no work
for pairs of other ranks, and none for single tokens.

Used by the method of needed rows, by the exchange of shards, and by the cost models. Pure
functions of layouts and masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.spans import cut, expanded, union

Array = NDArray[np.int64]
# Each range that a rank needs is a message of its own; two for each rank are always allowed.
MAX_RANGES = 4096


@lru_cache(maxsize=16)
def _runs_of(layout: Layout) -> Array:
    return layout.all_runs()


def _num_ranges(layout: Layout) -> int:
    """Ranges of consecutive positions that the ranks own."""
    return int(_runs_of(layout)[:, 3].sum())


def has_few_ranges(layout: Layout) -> bool:
    """Whether the ranges of a layout can be exchanged one by one."""
    return _num_ranges(layout) <= max(MAX_RANGES, 2 * layout.num_ranks)


def check_ranges(layout: Layout, what: str, other_layouts: str) -> None:
    if has_few_ranges(layout):
        return
    ways = f"give a stripe_block of at least {-(-layout.num_tokens // MAX_RANGES)}"
    if layout.kind is LayoutKind.LISTED:
        ways = "list fewer and longer 'stretches'"
    raise PlanError(
        f"{what} {_num_ranges(layout)} stretches, each of which would be a message of its own; "
        f"at most {MAX_RANGES} are supported: {ways}, or layout={other_layouts}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class OwnedRanges:
    """Positions `starts..stops` of real tokens begin at `places`; by rank, in slot order."""

    starts: Array
    stops: Array
    places: Array

    def __getitem__(self, which: Array) -> OwnedRanges:
        return OwnedRanges(self.starts[which], self.stops[which], self.places[which])


def blocks_of(layout: Layout) -> tuple[Array, Array, Array]:
    """Blocks of consecutive positions of one rank, with padding, in order of place: their first
    positions, sizes and places."""
    table = _runs_of(layout)
    run, turn = expanded(np.zeros(len(table), dtype=np.int64), table[:, 3])
    sizes = table[run, 1]
    return table[run, 0] + turn * table[run, 2], sizes, np.cumsum(sizes) - sizes


@lru_cache(maxsize=16)
def ranges_of(layout: Layout) -> OwnedRanges:
    starts, block, places = blocks_of(layout)
    # Blocks that touch on one rank, as the halves in the middle of a zigzag do, are one range.
    new = np.ones(len(starts), dtype=np.bool_)
    owners = places // layout.slots
    new[1:] = (starts[1:] != (starts + block)[:-1]) | (owners[1:] != owners[:-1])
    at = np.flatnonzero(new)
    starts, places = starts[at], places[at]
    stops = np.minimum(starts + np.add.reduceat(block, at), layout.num_tokens)
    return OwnedRanges(starts, stops, places)[np.flatnonzero(starts < stops)]


class QueryParts(NamedTuple):
    """Queries `low..high` of one range and one segment of the mask, with an interval of keys."""

    range: Array  # its index
    low: Array
    high: Array  # the last query
    lo: Array
    lo_slope: Array
    hi: Array
    hi_slope: Array


def query_parts(starts: Array, stops: Array, rows: RowRanges) -> QueryParts:
    index, at, low, high = cut(starts, stops, *rows.edges)
    parts = [QueryParts(index, low, high - 1, *lines) for lines in rows.lines(at)]
    if len(parts) == 1:
        return parts[0]
    return QueryParts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@lru_cache(maxsize=8)  # the search for a layout and the plan ask for the same
def _parts_of(layout: Layout, rows: RowRanges) -> QueryParts:
    """The parts of the queries of all ranks."""
    own = ranges_of(layout)
    return query_parts(own.starts, own.stops, rows)


def visible_keys(p: QueryParts) -> tuple[Array, Array, Array]:
    """For each part the index of its range and the interval of keys that it sees; intervals may
    be empty, and may overlap.

    The ends of an interval are lines on a segment of the mask and never fall there, so the first
    and the last query of a segment bound what all in between see.
    """
    return p.range, p.lo + p.lo_slope * p.low, p.hi + p.hi_slope * p.high


def _queries_seeing(keys: OwnedRanges, rows: RowRanges) -> tuple[Array, Array, Array]:
    """For keys of some ranges, which are in order, the index of their range and an interval of
    queries that see some of them; intervals may be empty, and may overlap.

    On a segment of the mask later keys are seen by later queries: the first and the last key of a
    range bound the queries that see any of the keys in between.
    """
    start, stop = rows.edges
    parts: list[tuple[Array, ...]] = []
    for lo, lo_slope, hi, hi_slope in rows.lines(np.arange(len(start))):
        seen = lo + lo_slope * start, hi + hi_slope * (stop - 1)
        of, index, low, high = cut(*seen, keys.starts, keys.stops)
        # A key k is seen from query k - hi + 1 on, and up to query k - lo.
        first = np.where(hi_slope[of] > 0, np.maximum(start[of], low - hi[of] + 1), start[of])
        last = np.where(lo_slope[of] > 0, np.minimum(stop[of], high - lo[of]), stop[of])
        parts.append((index, first, np.where(low < high, last, first)))
    index, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
    return index, first, last


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a rank exchanges with others: ranges of `sizes` rows that begin at the `slots` of
    their owner, in order of position."""

    ranks: Array  # the other rank
    slots: Array
    sizes: Array


class NeededRows:
    """The rows of one side that ranks work on, as intervals of positions.

    Ranks lie in a grid. All ranks of a *line* of the grid work on the same positions, each of them
    on the part that belongs to ranks of its own place in the lines. An interval of line l is kept
    as `l * stride` plus positions, so that all lines are sorted, joined and searched together.
    """

    def __init__(
        self, layout: Layout, grid: tuple[Array, Array], intervals: tuple[Array, Array, Array]
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
        self._lo, self._hi = union(base + lo[some], base + hi[some])
        owned = ranges_of(layout)
        self._owned = owned[np.argsort(owned.starts, kind="stable")]
        self._owners = self._owned.places // layout.slots

    @cached_property
    def travels(self) -> bool:
        """Whether some rank needs a row that it does not own. Every position belongs to one place,
        so this holds unless owners need all that is needed of their rows."""
        line = self._lines[self._owners] * self._stride
        order = np.argsort(line + self._owned.starts)
        starts, stops = ((line + edge)[order] for edge in (self._owned.starts, self._owned.stops))
        _, _, low, high = cut(self._lo, self._hi, starts, stops)
        return bool((high - low).sum() < (self._hi - self._lo).sum())

    def tokens_between(self) -> tuple[Array, Array, Array]:
        """Users, owners, and how many rows each of these users needs of each of these owners, its
        own rows too. A pair of ranks may come several times; most come not at all."""
        owned = self._owned
        line, lo = np.divmod(self._lo, self._stride)
        index, at, low, high = cut(lo, lo + self._hi - self._lo, owned.starts, owned.stops)
        owners = self._owners[at]
        return self._ranks[line[index], self._places[owners]], owners, high - low

    def received(self, rank: int) -> Rows:
        """What a rank works on, by owner, its own rows too."""
        base = self._lines[rank] * self._stride
        first, last = np.searchsorted(self._lo, (base, base + self._stride)).tolist()
        lo, hi = self._lo[first:last] - base, self._hi[first:last] - base
        near = np.flatnonzero(self._places[self._owners] == self._places[rank])
        owned = self._owned[near]
        index, at, low, high = cut(lo, hi, owned.starts, owned.stops)
        return self._rows(self._owners[near[at]], owned[at], first + index, low, high)

    def sent(self, rank: int) -> Rows:
        """What ranks work on of this rank's rows, by user, itself too."""
        own = self._owned[np.flatnonzero(self._owners == rank)]
        line, lo = np.divmod(self._lo, self._stride)
        index, at, low, high = cut(lo, lo + self._hi - self._lo, own.starts, own.stops)
        return self._rows(self._ranks[line[index], self._places[rank]], own[at], index, low, high)

    def _rows(
        self, ranks: Array, within: OwnedRanges, interval: Array, low: Array, high: Array
    ) -> Rows:
        """Parts that follow each other on both sides are one: in the slots of the owner, and in the
        rows of the user, where a part ends its interval and the next part begins the next one."""
        slots, sizes = (within.places + low - within.starts) % self._layout.slots, high - low
        begin = self._lo[interval] % self._stride
        end = begin + (self._hi - self._lo)[interval]
        follows = (ranks[1:] == ranks[:-1]) & (slots[1:] == (slots + sizes)[:-1])
        follows &= (interval[1:] == interval[:-1] + 1) & (high == end)[:-1] & (low == begin)[1:]
        first = np.flatnonzero(np.append(True, ~follows)[: len(ranks)])
        sizes = np.add.reduceat(sizes, first) if len(first) else sizes
        return Rows(ranks[first], slots[first], sizes)


@lru_cache(maxsize=4)
def needed_keys(q_layout: Layout, kv_layout: Layout, rows: RowRanges, columns: int) -> NeededRows:
    """Keys of a rank's tile column that queries of its tile row see. With one column: all keys that
    its own queries see."""
    row, column = np.divmod(np.arange(q_layout.num_ranks), columns)  # of each rank
    index, lo, hi = visible_keys(_parts_of(q_layout, rows))
    owners = ranges_of(q_layout).places[index] // q_layout.slots
    return NeededRows(kv_layout, (row, column), (row[owners], lo, hi))


@lru_cache(maxsize=4)  # both passes and the bounds of a search ask for the same
def needed_queries(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, columns: int
) -> NeededRows:
    """Queries of a rank's tile row that see keys of its tile column."""
    row, column = np.divmod(np.arange(q_layout.num_ranks), columns)  # of each rank
    keys = ranges_of(kv_layout)
    keys = keys[np.argsort(keys.starts, kind="stable")]
    index, lo, hi = _queries_seeing(keys, rows)
    owners = keys.places[index] // kv_layout.slots
    return NeededRows(q_layout, (column, row), (column[owners], lo, hi))


def pairs_of_ranks(layout: Layout, rows: RowRanges) -> NDArray[np.float64]:
    """Visible (query, key) pairs of the queries of each rank."""
    p = _parts_of(layout, rows)
    slope = p.hi_slope - p.lo_slope
    twice = (p.high + 1 - p.low) * np.maximum(2 * (p.hi - p.lo) + slope * (p.low + p.high), 0)
    rank = ranges_of(layout).places[p.range] // layout.slots
    return np.bincount(rank, weights=twice, minlength=layout.num_ranks) / 2
