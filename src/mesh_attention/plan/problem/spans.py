"""Intervals of rows, one after the other: how buffers, tiles and ranks name what they hold.

Plain tuples of (start, stop), so that they can be compared and be keys of caches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
