"""A mask on real token counts: which intervals of key positions every query sees.

Masks become this, and lowering, counting, proving and the masks of kernels read it. Queries are cut
into segments. On a segment a query sees a few intervals of keys, disjoint and in order, and both
ends of an interval are lines of slope 0 or 1: everything downstream works on intervals and never on
single tokens. Most masks have one interval a query. On a segment bounds never fall as `q` grows, so
the first and the last query bound all between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from mesh_attention.plan.problem.spans import Array, cut


class Interval(NamedTuple):
    """Keys `lo + lo_slope*q <= k < hi + hi_slope*q`."""

    lo: int
    lo_slope: int
    hi: int
    hi_slope: int

    def at(self, q: int) -> tuple[int, int]:
        return self.lo + self.lo_slope * q, self.hi + self.hi_slope * q


_NOTHING = Interval(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries `start <= q < stop` see these intervals of keys, which never meet. Queries that see
    nothing have no interval or a single empty one; each of several has keys for every query."""

    start: int
    stop: int
    intervals: tuple[Interval, ...]


class RowRanges:
    """Segments, and vectorised bounds of what a query sees; `edges` are their starts and stops."""

    __slots__ = (
        "_layers", "_starts", "edges", "kv_tokens", "most_intervals", "q_tokens", "segments",
    )  # fmt: skip

    def __init__(self, segments: tuple[Segment, ...], q_tokens: int, kv_tokens: int) -> None:
        self.segments = segments
        self.q_tokens = q_tokens
        self.kv_tokens = kv_tokens
        starts, stops = [s.start for s in segments], [s.stop for s in segments]
        self.edges = np.array([starts, stops], dtype=np.int64)
        self._starts = self.edges[0]
        self.most_intervals = max((len(s.intervals) for s in segments), default=1) or 1
        self._layers = tuple(
            _columns([s.intervals[i] if i < len(s.intervals) else _NOTHING for s in segments])
            for i in range(self.most_intervals)
        )

    def intervals(self, q: Array) -> tuple[Array, Array]:
        """`lo` and `hi` of each interval of each query position, (most_intervals, queries); where a
        query has fewer, the last ones are empty."""
        if not self.segments:
            nothing = np.zeros((1, *q.shape), dtype=np.int64)
            return nothing, nothing
        at = np.maximum(np.searchsorted(self._starts, q, side="right") - 1, 0)
        lines = np.array(self.lines(at))
        real = q < self.q_tokens  # padding sees nothing
        return (lines[:, 0] + lines[:, 1] * q) * real, (lines[:, 2] + lines[:, 3] * q) * real

    def segment_at(self, q: int) -> Segment:
        return self.segments[int(np.searchsorted(self._starts, q, side="right")) - 1]

    def segments_between(self, start: int, stop: int) -> range:
        """Indices of the segments that may hold queries of `start..stop`."""
        first = max(int(np.searchsorted(self._starts, start, side="right")) - 1, 0)
        return range(first, int(np.searchsorted(self._starts, stop, side="left")))

    def segments_of(self, starts: Array, stops: Array) -> list[Segment]:
        """Those that hold queries of these stretches, each once and in order."""
        _, at, _, _ = cut(starts, stops, *self.edges)
        return [self.segments[i] for i in sorted({*at.tolist()})]

    def lines(self, at: Array) -> tuple[tuple[Array, ...], ...]:
        """lo, its slope, hi and its slope of these segments, interval by interval; an interval that
        a segment does not have is empty."""
        return tuple(tuple(line[at] for line in layer) for layer in self._layers)

    def intervals_between(self, start: int, stop: int) -> int:
        """The most intervals that a query of `start..stop` may have, at least one."""
        if self.most_intervals == 1:
            return 1
        at = self.segments_between(start, stop)
        return max((len(s.intervals) for s in self.segments[at.start : at.stop]), default=1) or 1

    def table(self, most: int) -> Array:
        """lo, its slope, hi and its slope of the first `most` intervals of all segments: an array
        (4, segments), or (4, most, segments) where `most` is more than 1."""
        lines = np.array(self._layers[:most]).swapaxes(0, 1)
        return lines[:, 0] if most == 1 else lines


def _columns(lines: Sequence[Interval]) -> tuple[Array, ...]:
    table = np.fromiter(chain.from_iterable(lines), dtype=np.int64, count=4 * len(lines))
    return tuple(table.reshape(-1, 4).T.copy())


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments with neighbours joined where the lines of one hold for both."""
    result: list[Segment] = []
    for s in segments:
        last = result[-1] if result else None
        if last and _are_apart(last, s):
            result.append(s)
        elif last and _hold(last.intervals, s):
            result[-1] = Segment(last.start, s.stop, last.intervals)
        elif last and _hold(s.intervals, last):
            result[-1] = Segment(last.start, s.stop, s.intervals)
        else:
            result.append(s)
    return tuple(result)


def _are_apart(segment: Segment, other: Segment) -> bool:
    """Whether their first lines are parallel, as those of two documents are. Then neither holds
    for both, which `_hold` would find more slowly."""
    if not segment.intervals or not other.intervals:
        return False
    a, b = segment.intervals[0], other.intervals[0]
    return a.lo_slope == b.lo_slope and a.lo != b.lo


def _hold(lines: tuple[Interval, ...], on: Segment) -> bool:
    """Whether these lines equal a segment's at its first and its last query."""
    if len(lines) != len(on.intervals):
        return False
    return all(
        a == b or (a.at(on.start) == b.at(on.start) and a.at(on.stop - 1) == b.at(on.stop - 1))
        for a, b in zip(lines, on.intervals, strict=True)
    )
