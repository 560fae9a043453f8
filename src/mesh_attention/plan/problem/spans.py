"""Intervals of rows, one after the other: how buffers, tiles and ranks name what they hold.

Plain tuples of (start, stop), so that they can be compared and be keys of caches. Where there are
many, arrays of their starts and of their stops are cut and joined faster: layouts, counts of pairs
and `needed_rows.py` of the methods do so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Spans = tuple[tuple[int, int], ...]  # (start, stop), in order


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The intervals without empty ones, neighbours that touch joined.

    >>> joined([(0, 2), (2, 5), (7, 7), (8, 9)])
    ((0, 5), (8, 9))
    """
    result: list[tuple[int, int]] = []
    first = last = -1
    for start, stop in spans:
        if start == stop:
            continue
        if start != last:
            result.append((first, last))
            first = start
        last = stop
    return (*result[1:], (first, last)) if result else ()


@lru_cache(maxsize=4096)  # the ranks of a unit have the same rows
def slice_spans(spans: Spans, start: int, stop: int) -> Spans:
    """Rows `start..stop` of intervals that lie one after the other.

    >>> slice_spans(((0, 4), (8, 12)), 2, 6)
    ((2, 4), (8, 10))
    """
    result = []
    at = 0
    for first, last in spans:
        if at >= stop:
            break
        end = at + last - first
        low, high = start if start > at else at, stop if stop < end else end
        if low < high:
            result.append((first + low - at, first + high - at))
        at = end
    return tuple(result)


def clip_spans(spans: Spans, start: int, stop: int) -> Spans:
    """The part of these intervals that lies between `start` and `stop`.

    >>> clip_spans(((0, 4), (8, 12)), 2, 9)
    ((2, 4), (8, 9))
    """
    if len(spans) == 1:  # the usual case, and a hot one
        ((a, b),) = spans
        a, b = start if a < start else a, stop if b > stop else b
        return ((a, b),) if a < b else ()
    clipped = [(start if a < start else a, stop if b > stop else b) for a, b in spans]
    return tuple([span for span in clipped if span[0] < span[1]])


def expanded(first: Array, last: Array) -> tuple[Array, Array]:
    """All pairs (i, j) with `first[i] <= j < last[i]`."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    begun = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - begun[index] + first[index]


def union(lo: Array, hi: Array) -> tuple[Array, Array]:
    """The union of intervals, in order."""
    order = np.argsort(lo, kind="stable")
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    new = np.ones(len(lo), dtype=np.bool_)
    new[1:] = lo[1:] > reach[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(lo)) - 1
    return lo[first], reach[last] if len(first) else reach


def cut(lo: Array, hi: Array, starts: Array, stops: Array) -> tuple[Array, Array, Array, Array]:
    """The parts of intervals inside ranges, which are disjoint and in order: the index of the
    interval and of the range, and the ends of the part."""
    first = np.searchsorted(stops, lo, side="right")
    index, at = expanded(first, np.searchsorted(starts, hi, side="left"))
    return index, at, np.maximum(lo[index], starts[at]), np.minimum(hi[index], stops[at])
