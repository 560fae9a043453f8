"""Which key rows the queries of each rank see, and where they lie: what has to travel, and no more.

All is found by intervals, for all ranks at once: the stretches of positions that ranks own, cut
where the mask bends, show an interval of keys each, and those of one rank are joined. A rank then
cuts its own intervals at the stretches of the owners to know what it receives, and the intervals of
all others at its own stretches to know what it sends. So its program costs no work for pairs of
other ranks, and none for single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.row_ranges import RowRanges

Array = NDArray[np.int64]


@lru_cache(maxsize=16)
def _runs_of(layout: Layout) -> Array:
    """Start, block, stride and count of the runs of all ranks."""
    runs = layout.runs(0, layout.slots * layout.num_ranks)
    return np.array([(r.start, r.block, r.stride, r.count) for r in runs], dtype=np.int64)


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


@lru_cache(maxsize=16)
def stretches_of(layout: Layout) -> OwnedStretches:
    table = _runs_of(layout)
    run, turn = expanded(np.zeros(len(table), dtype=np.int64), table[:, 3])
    starts, block = table[run, 0] + turn * table[run, 2], table[run, 1]
    places = np.cumsum(block) - block
    # What one rank owns in one piece, as the halves in the middle of a zigzag, is one stretch.
    new = np.ones(len(starts), dtype=np.bool_)
    owners = places // layout.slots
    new[1:] = (starts[1:] != (starts + block)[:-1]) | (owners[1:] != owners[:-1])
    at = np.flatnonzero(new)
    starts, places = starts[at], places[at]
    stops = np.minimum(starts + np.add.reduceat(block, at), layout.num_tokens)
    return OwnedStretches(starts, stops, places)[np.flatnonzero(starts < stops)]


def keys_seen(starts: Array, stops: Array, rows: RowRanges) -> tuple[Array, Array, Array]:
    """Intervals of keys that stretches of queries see, each with the index of its stretch; some
    are empty, and some meet.

    The ends of an interval are lines on a segment of the mask, and never fall there: the first and
    the last query of a segment bound what all in between see.
    """
    edges = np.array([(s.start, s.stop) for s in rows.segments], dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(edges[:, 1], starts, side="right")
    index, at = expanded(first, np.searchsorted(edges[:, 0], stops, side="left"))
    low = np.maximum(starts[index], edges[at, 0])
    high = np.minimum(stops[index], edges[at, 1]) - 1
    layers = [
        (lo + lo_slope * low, hi + hi_slope * high) for lo, lo_slope, hi, hi_slope in rows.lines(at)
    ]
    lows, highs = zip(*layers, strict=True)
    return np.tile(index, len(layers)), np.concatenate(lows), np.concatenate(highs)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that one rank gets from another or gives to it: stretches of `size` rows that begin at a
    slot of their owner, in order of position."""

    ranks: Array  # the other rank
    slots: Array
    sizes: Array


class SeenRows:
    """What the queries of all ranks see, as intervals of key positions.

    An interval of rank r is kept as `r * stride` and its positions, so that those of all ranks can
    be sorted, joined and searched together.
    """

    def __init__(self, q_layout: Layout, kv_layout: Layout, rows: RowRanges) -> None:
        self._layout = kv_layout
        self._stride = kv_layout.num_tokens + 1  # intervals of two ranks never touch
        queries = stretches_of(q_layout)
        index, lo, hi = keys_seen(queries.starts, queries.stops, rows)
        viewers = queries.places[index] // q_layout.slots * self._stride
        some = lo < hi
        self._lo, self._hi = _joined(viewers[some] + lo[some], viewers[some] + hi[some])
        keys = stretches_of(kv_layout)
        self._keys = keys[np.argsort(keys.starts, kind="stable")]
        self._owners = self._keys.places // kv_layout.slots

    @cached_property
    def travels(self) -> bool:
        """Does any rank see a row that it does not own?"""
        own = self._owners * self._stride
        order = np.argsort(own + self._keys.starts)
        starts, stops = ((own + edge)[order] for edge in (self._keys.starts, self._keys.stops))
        _, _, low, high = _cut(self._lo, self._hi, starts, stops)
        return bool((high - low).sum() < (self._hi - self._lo).sum())

    def tokens_between(self) -> Array:
        """How many rows of each owner each rank sees, [viewer, owner]; own ones are among them."""
        ranks = self._layout.num_ranks
        viewers, lo = np.divmod(self._lo, self._stride)
        keys = self._keys
        index, at, low, high = _cut(lo, lo + self._hi - self._lo, keys.starts, keys.stops)
        pairs = viewers[index] * ranks + self._owners[at]
        found = np.bincount(pairs, weights=high - low, minlength=ranks * ranks)
        return found.astype(np.int64).reshape(ranks, ranks)

    def received(self, rank: int) -> Rows:
        """What a rank sees, by owner; its own rows are among it."""
        base = rank * self._stride
        first, last = np.searchsorted(self._lo, (base, base + self._stride)).tolist()
        lo, hi = self._lo[first:last] - base, self._hi[first:last] - base
        _, at, low, high = _cut(lo, hi, self._keys.starts, self._keys.stops)
        return self._rows(self._owners[at], self._keys[at], low, high)

    def given(self, rank: int) -> Rows:
        """What others see of a rank, by viewer; what it sees itself is among it."""
        own = self._keys[np.flatnonzero(self._owners == rank)]
        viewers, lo = np.divmod(self._lo, self._stride)
        index, at, low, high = _cut(lo, lo + self._hi - self._lo, own.starts, own.stops)
        return self._rows(viewers[index], own[at], low, high)

    def _rows(self, ranks: Array, within: OwnedStretches, low: Array, high: Array) -> Rows:
        slots = (within.places + low - within.starts) % self._layout.slots
        return Rows(ranks, slots, high - low)


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
