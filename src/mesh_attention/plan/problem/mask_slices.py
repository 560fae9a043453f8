"""Masks that are unions of slices: some queries see some keys, all of them or up to a diagonal.

Only `mask.py` uses this file. A slice is one interval of keys whose ends are lines of slope 0 or 1,
so a union of slices becomes `RowRanges`: queries are cut wherever slices begin, end or cross, and
between two cuts intervals that overlap or touch are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate, islice, pairwise
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.row_ranges import Interval, RowRanges, Segment, joined


class SliceKind(StrEnum):
    """Which pairs of a slice are seen. In these, of 3 queries (rows) and 5 keys:

    full         causal       inverse_causal   bicausal
    # # # # #    # # # . .    # # # # #        # # # . .
    # # # # #    # # # # .    . # # # #        . # # # .
    # # # # #    # # # # #    . . # # #        . . # # #
    """

    FULL = "full"
    CAUSAL = "causal"  # the last query sees the last key
    INVERSE_CAUSAL = "inverse_causal"  # the first query sees the first key
    BICAUSAL = "bicausal"  # both


# (start, stop) of queries, of keys, and a `SliceKind` or its text.
Slice = tuple[tuple[int, int], tuple[int, int], str]


_ALSO: dict[Any, SliceKind] = {  # with MagiAttention's words and numbers for the same
    **{kind.value: kind for kind in SliceKind},
    **dict(enumerate(SliceKind)),
    "inv_causal": SliceKind.INVERSE_CAUSAL,
    "bi_causal": SliceKind.BICAUSAL,
}
# Of the lines at which the keys of a query begin and end.
_SLOPES: dict[str, tuple[int, int]] = {
    SliceKind.FULL: (0, 0),
    SliceKind.CAUSAL: (0, 1),
    SliceKind.INVERSE_CAUSAL: (1, 0),
    SliceKind.BICAUSAL: (1, 1),
}
_KIND_OF = {slopes: kind for kind, slopes in _SLOPES.items()}
MAX_SLICES = 1 << 14
_FORM = "give ((query start, stop), (key start, stop), kind)"


def checked_slices(slices: Any) -> tuple[Slice, ...]:
    if not isinstance(slices, Iterable) or isinstance(slices, str | bytes):
        raise PlanError(f"slices={slices!r}: give a list of slices, and of each {_FORM[5:]}")
    checked = tuple(_checked(at, x) for at, x in enumerate(islice(slices, MAX_SLICES + 1)))
    if len(checked) > MAX_SLICES:
        raise PlanError(
            f"more than {MAX_SLICES} slices, for which planning would take minutes and GiBs; use "
            "larger blocks, or documents in place of slices"
        )
    return checked


def _checked(at: int, item: Any) -> Slice:
    try:
        queries, keys, kind = item
        (q0, q1), (k0, k1) = queries, keys
    except (TypeError, ValueError):
        raise PlanError(f"slice {at} is {item!r}: {_FORM}") from None
    if not type(q0) is type(q1) is type(k0) is type(k1) is int or min(q0, q1, k0, k1) < 0:
        # Masks may have thousands of slices and change with batches: most take the short way.
        q0, q1 = (number(f"slice {at}: queries", x, least=0) for x in (q0, q1))
        k0, k1 = (number(f"slice {at}: keys", x, least=0) for x in (k0, k1))
    for name, start, stop in (("queries", q0, q1), ("keys", k0, k1)):
        if stop < start:
            raise PlanError(f"slice {at} has {name} {start} to {stop}: it stops before it starts")
    try:
        return (q0, q1), (k0, k1), _ALSO[None if isinstance(kind, bool) else kind]
    except (TypeError, KeyError):
        raise PlanError(
            f"slice {at} is of kind {kind!r}; valid kinds are: {', '.join(SliceKind)}"
        ) from None


# Queries from and to, of a slice without the queries that see nothing of it, and what they see.
_Piece = tuple[int, int, Interval]


def _pieces(slices: Iterable[Slice]) -> Iterator[_Piece]:
    for (q0, q1), (k0, k1), kind in slices:
        follows, rises = _SLOPES[kind]
        start, stop = q0, q1
        if rises and follows:
            stop = q1 if k1 - k0 >= q1 - q0 else q0
        elif rises:
            start = max(q0, q1 - (k1 - k0))
        elif follows:
            stop = min(q1, q0 + k1 - k0)
        if start < stop and k0 < k1:
            yield start, stop, Interval(k0 - follows * q0, follows, k1 - rises * (q1 - 1), rises)


def segments_of(slices: Iterable[Slice], q_tokens: int) -> tuple[Segment, ...]:
    """All queries, each with the union of what slices show of it."""
    pieces = sorted(_pieces(slices))
    cuts = sorted({0, q_tokens, *(edge for piece in pieces for edge in piece[:2])})
    segments: list[Segment] = []
    active: list[_Piece] = []
    reached = 0
    for start, stop in pairwise(cuts):
        active = [piece for piece in active if piece[1] > start]
        while reached < len(pieces) and pieces[reached][0] == start:
            active.append(pieces[reached])
            reached += 1
        intervals = {interval for _, _, interval in active}
        if len(intervals) < 2:
            segments.append(Segment(start, stop, tuple(intervals)))
            continue
        lines = {line for interval in intervals for line in (interval[:2], interval[2:])}
        for a, b in pairwise(crossings(lines, start, stop)):
            segments.append(Segment(a, b, _union(intervals, a, b)))
    return joined(segments)


def crossings(lines: Collection[tuple[int, int]], start: int, stop: int) -> list[int]:
    """`start`, `stop` and where two lines (base, slope) between them may swap places: where a flat
    line meets a steep one, c = base + q."""
    flat = {base for base, slope in lines if slope == 0}
    steep = {base for base, slope in lines if slope == 1}
    inside = {c - s for s in steep for c in flat if start < c - s < stop}
    return sorted({start, stop} | inside)


def _union(intervals: set[Interval], start: int, stop: int) -> tuple[Interval, ...]:
    """The intervals, joined where they overlap or touch. No two ends swap places between `start`
    and `stop`."""
    last = stop - 1
    at_ends = sorted(
        (i.lo + i.lo_slope * start, i.lo + i.lo_slope * last, i.hi + i.hi_slope * start, i)
        for i in intervals
    )
    united: list[Interval] = []
    hi0 = hi1 = -1  # of the last one found, at the first and the last query
    for lo0, lo1, end0, interval in at_ends:
        end1 = interval.hi + interval.hi_slope * last
        if not united or lo0 > hi0 or lo1 > hi1:
            united.append(interval)
            hi0, hi1 = end0, end1
        elif (end0, end1) > (hi0, hi1):
            before = united[-1]
            united[-1] = Interval(before.lo, before.lo_slope, interval.hi, interval.hi_slope)
            hi0, hi1 = end0, end1
    return tuple(united)


def slices_of(rows: RowRanges) -> Iterator[Slice]:
    """A mask as slices: one for each interval of each segment."""
    for s in rows.segments:
        for i in s.intervals:
            first, last = i.at(s.start), i.at(s.stop - 1)
            if first[0] < last[1]:
                kind = _KIND_OF[i.lo_slope, i.hi_slope]
                yield (s.start, s.stop), (first[0], last[1]), kind


def tree_slices(parents: Sequence[int | None], lengths: Sequence[int]) -> Iterator[Slice]:
    """Nodes that lie one after another: each sees itself causally and its ancestors whole."""
    starts = list(accumulate(lengths, initial=0))
    above: list[tuple[tuple[int, int], ...]] = []  # what the children of a node see, by node
    for parent, own in zip(parents, pairwise(starts), strict=True):
        seen = [] if parent is None else list(above[parent])
        if seen and seen[-1][1] == own[0]:  # it follows its parent: one stretch of keys
            seen[-1] = (seen[-1][0], own[1])
        else:
            seen.append(own)
        above.append(tuple(seen))
        yield from ((own, keys, SliceKind.FULL) for keys in seen[:-1])
        yield own, seen[-1], SliceKind.CAUSAL


def frame_slices(num_tokens: int, frame: int, num_seen: int | None) -> Iterator[Slice]:
    """Frames of `frame` tokens: each sees itself and the frames before it, `num_seen` in all."""
    for start in range(0, num_tokens, frame):
        stop = min(start + frame, num_tokens)
        first = 0 if num_seen is None else max(0, start - (num_seen - 1) * frame)
        yield (start, stop), (first, stop), SliceKind.FULL
