"""Lowering: a compute task becomes kernel calls (design.md, "Compute lowering").

A task is a list of query rows against a list of key rows, in buffer order. It becomes maximal
fully visible rectangles, causal squares, and row ranges only where neither fits. Both lists are cut
into blocks of consecutive positions such that every (query block, key block) cell is empty, full,
a causal square or ragged; equal neighbours are then joined into rectangles (`blocks.py`).

Blocks of queries are cut where segments of the mask begin. On a segment bounds never fall: the
intervals of the first and the last query of a piece show which keys it sees whole, in part or not
at all. Where cells are open, blocks of keys are cut where intervals end, and both sides along
diagonals, so that causal squares are square. Of a ring's n^2 tasks all but a few have no open cell,
and a few comparisons decide them. Builders ask `lowerings_of`, and `attention` makes the operation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakValueDictionary

import numpy as np

from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.computed_pairs import pairs_of_rows
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Attention,
    Call,
    CallKind,
    Task,
)
from mesh_attention.plan.methods.parts.blocks import (
    Array,
    RowList,
    full_calls,
    grid_calls,
    row_list,
)
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges, Segment
from mesh_attention.plan.problem.spans import expanded

# A launch costs tens of microseconds: a task that would shatter into more calls than this (token
# stripes, hundreds of tiny documents) is one row-range call instead.
MAX_CALLS = 64
# More pairs of blocks are not looked at one by one.
MAX_PAIRS = (4 * MAX_CALLS) ** 2
# Up to so many pairs of pieces and key blocks are compared one by one; for more, arrays are faster.
_FEW_PAIRS = 32
# More segments hardly ever become few calls, and take long to look at.
_MOST_SEGMENTS = 256

COMPUTE = "C"  # the kind of task of an attention
Pair = tuple[Piece, Piece]  # of K and of V, or of their gradients
BlockList = Sequence[tuple[int, int]]  # (start, stop) of consecutive positions, in row order


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The query rows of a task, with the keys that they see under a mask."""

    list: RowList
    rows: RowRanges
    some: tuple[int, int] = (0, 0)  # no query sees a key outside
    every: tuple[int, int] = (0, 0)  # every query sees all keys inside
    pieces: SegmentPieces | None = None

    @staticmethod
    def of(q: RowList, rows: RowRanges) -> Queries:
        if not q.blocks:
            return Queries(q, rows, (0, rows.kv_tokens))
        pieces = SegmentPieces.of(q.edges, rows, rows.segments_of(*q.edges))
        every = int(pieces.lo_last[0].max()), int(pieces.hi_first[0].min())
        sees = pieces.lo_first < pieces.hi_last
        if not sees.any():
            return Queries(q, rows)
        some = int(pieces.lo_first[sees].min()), int(pieces.hi_last[sees].max())
        return Queries(q, rows, some, every, pieces)


def lower(q: Queries, k: RowList) -> tuple[Call, ...]:
    """Calls for the task, with rows counted inside the two lists; empty if nothing is visible."""
    if k.first >= q.some[1] or k.last < q.some[0]:
        return ()
    rows, calls = (0, q.list.num_rows, 0, k.num_rows), None
    if q.every[0] <= k.first and k.last < q.every[1]:
        return (Call(CallKind.FULL, *rows),)
    if q.pieces is not None and k.blocks and len(q.list.blocks) * len(k.blocks) <= MAX_PAIRS:
        calls = _calls(q.pieces, k, q.rows)
    if calls is None:
        pairs = pairs_of_rows(q.list.layout, k.layout, q.list.spans, k.spans, q.rows)
        kind = CallKind.FULL if pairs == q.list.num_rows * k.num_rows else CallKind.RANGE
        return (Call(kind, *rows),) if pairs else ()
    return (Call(CallKind.RANGE, *rows),) if len(calls) > MAX_CALLS else calls


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPieces:
    """Blocks of queries, each cut where segments begin, with the intervals of keys that the first
    and the last query of each piece see: arrays of (intervals, pieces), empty where a piece has
    fewer intervals."""

    near: list[Segment]
    edges: Array  # of the blocks
    starts: Array
    stops: Array
    first_rows: tuple[int, ...]
    lo_first: Array
    hi_first: Array
    lo_last: Array
    hi_last: Array

    @staticmethod
    def of(
        edges: Array, rows: RowRanges, near: list[Segment], cuts: Iterable[int] = ()
    ) -> SegmentPieces:
        """`near`: the segments that these queries are in; `cuts`: where blocks are cut besides."""
        own = {*cuts, *(s.start for s in near), rows.q_tokens}
        starts, stops, first_rows = _cut(edges, sorted(own))
        ends = (*rows.intervals(starts), *rows.intervals(stops - 1))
        return SegmentPieces(near, edges, starts, stops, first_rows, *ends)

    def picture(self, keys: BlockList) -> bytes | None:
        """For each (piece, key block) 1 if all is visible and 0 if nothing is, row by row; None
        where a cell is open, or they are many."""
        if len(self.starts) * len(keys) > _FEW_PAIRS:
            return None
        sides = (self.lo_first, self.hi_first, self.lo_last, self.hi_last)
        cells = bytearray()
        for intervals in zip(*(side.T.tolist() for side in sides), strict=True):
            for start, stop in keys:
                seen = 0
                for lo0, hi0, lo1, hi1 in zip(*intervals, strict=True):
                    if start < hi1 and stop > lo0:
                        if lo1 > start or stop > hi0:
                            return None
                        seen = 1
                cells.append(seen)
        return bytes(cells)

    def see(self, starts: Array, stops: Array) -> bool:
        """Whether any of these queries sees any of these keys."""
        return any(
            bool(((starts < hi[:, None]) & (stops > lo[:, None])).any())
            for lo, hi in zip(self.lo_first, self.hi_last, strict=True)
        )

    def shatter(self, starts: Array, stops: Array) -> bool:
        """Whether the cells would be more calls than are wanted, known without them: rows of which
        the last key that all see is another, or that some see, are in other rectangles. Cells are
        cut where pieces begin and keys end. Only for rows that see keys from one place on."""
        if len(self.lo_first) > 1 or (self.lo_first != self.lo_last).any():
            return False
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        before = np.concatenate([[0], np.cumsum(stops - starts)])

        def number(ends: Array) -> Array:
            """Of keys before each of these positions."""
            at = np.searchsorted(starts, ends)
            keys: Array = before[at] - (at > 0) * np.maximum(stops[at - 1] - ends, 0)
            return keys

        low, high = np.sort(self.hi_first[0]), np.sort(self.hi_last[0])
        at = np.searchsorted(low, stops, "right") > np.searchsorted(high, stops, "right")
        by_all, by_some = number(np.append(low - 1, stops[at])), np.append(high, stops[at])
        by_some = number(by_some)[number(by_some) > number(by_some - 1)]
        kinds = [np.count_nonzero(np.diff(np.sort(seen))) for seen in (by_all, by_some)]
        return int(sum(kinds)) > MAX_CALLS  # of the first, one may be no key


def _calls(q: SegmentPieces, k: RowList, rows: RowRanges) -> tuple[Call, ...] | None:
    """None where the two see each other in part, and too many cells would be needed to say how."""
    keys = k.blocks
    picture = q.picture(keys)
    if picture is not None:
        return full_calls(picture, q.first_rows, k.first_rows)
    if not q.see(*k.edges):
        return ()
    if q.shatter(*k.edges):
        return (Call(CallKind.RANGE, 0, q.first_rows[-1], 0, k.num_rows),)
    if len(q.near) > _MOST_SEGMENTS:
        return None
    q_cuts, k_cuts = _cuts(q, keys, rows)
    q = SegmentPieces.of(q.edges, rows, q.near, q_cuts)
    starts, stops, first_rows = _cut(k.edges, k_cuts)
    if len(q.starts) * len(starts) > MAX_PAIRS:
        return None
    size = (q.stops - q.starts)[:, None]
    full, square = np.zeros((2, len(q.starts), len(starts)), dtype=np.bool_)
    times_seen = np.zeros(full.shape, dtype=np.int16)
    for lo0, hi0, lo1, hi1 in zip(q.lo_first, q.hi_first, q.lo_last, q.hi_last, strict=True):
        below = lo1[:, None] <= starts
        full |= below & (stops <= hi0[:, None])
        times_seen += (starts < hi1[:, None]) & (stops > lo0[:, None])
        on_edge = (hi0[:, None] == starts + 1) & (hi1[:, None] == starts + size)
        square |= below & on_edge & (stops == starts + size)
    ragged = (times_seen > 0) & ~full
    square &= ragged & (times_seen == 1)  # a square cannot show a second interval
    return grid_calls(full, ragged, square, q.first_rows, first_rows, most=MAX_CALLS + 1)


def _cut(edges: Array, cuts: list[int]) -> tuple[Array, Array, tuple[int, ...]]:
    """Starts and stops of the pieces, and the first row of each and one past the last."""
    (starts, stops), at = edges, np.array(cuts, dtype=np.int64)
    first, last = np.searchsorted(at, starts, "right"), np.searchsorted(at, stops)
    if not (last > first).any():  # all stay whole
        return starts, stops, (0, *np.cumsum(stops - starts).tolist())
    of, cut = expanded(first, last + 1)  # of each piece its block, and the cut where it ends
    ends = np.where(cut == last[of], stops[of], np.append(at, 0)[cut])
    begins = np.where(cut == first[of], starts[of], at[cut - 1])
    return begins, ends, (0, *np.cumsum(ends - begins).tolist())


def _cuts(q: SegmentPieces, keys: BlockList, rows: RowRanges) -> tuple[set[int], list[int]]:
    """Where diagonals meet ends of keys, and where the mask bends inside key blocks."""
    q_cuts, k_cuts = set[int](), {rows.kv_tokens}
    diagonals: list[tuple[int, int, int]] = []  # first and last query, and the key of query 0
    for s in q.near:
        for i in s.intervals:
            ends = (i.lo, i.lo_slope), (i.hi, i.hi_slope)
            k_cuts.update(base for base, slope in ends if not slope)
            if i.hi_slope:
                diagonals.append((s.start, s.stop, i.hi - 1))
    q_edges = sorted({*q.starts.tolist(), *q.stops.tolist()})
    k_edges = sorted({edge for block in keys for edge in block} | k_cuts)
    for start, stop, key in diagonals:
        inside = q_edges[bisect_left(q_edges, start) : bisect_right(q_edges, stop)]
        k_cuts.update(edge + key for edge in inside)
        between = k_edges[bisect_right(k_edges, start + key) : bisect_left(k_edges, stop + key)]
        q_cuts.update(edge - key for edge in between)
    return q_cuts, sorted(k_cuts)


_lowerings = WeakValueDictionary[tuple[Layout, Layout, RowRanges, bool], "Lowerings"]()


def lowerings_of(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, *, one_call: bool = False
) -> Lowerings:
    """Shared by all plans with these layouts and this mask, while there is one of them."""
    key = q_layout, kv_layout, rows, one_call
    known = _lowerings.get(key)
    if known is None:
        known = _lowerings[key] = Lowerings(q_layout, kv_layout, rows, one_call=one_call)
    return known


class Lowerings:
    """Calls of tasks, each lowered once: passes and ranks ask for the same."""

    def __init__(
        self, q_layout: Layout, kv_layout: Layout, rows: RowRanges, *, one_call: bool = False
    ) -> None:
        """`one_call`: each task is one call, whatever is visible."""
        self._one_call = one_call
        look = Queries if one_call else Queries.of
        self.queries = cache(lambda spans: look(row_list(q_layout, spans), rows))
        self.keys = cache(lambda spans: row_list(kv_layout, spans))
        self._calls: dict[tuple[Queries, RowList], tuple[Call, ...]] = {}
        self._equal: dict[tuple[Call, ...], tuple[Call, ...]] = {}

    def calls(self, q: Queries, k: RowList) -> tuple[Call, ...]:
        calls = self._calls.get((q, k))
        if calls is None:
            whole = (Call(CallKind.RANGE, 0, q.list.num_rows, 0, k.num_rows),)
            calls = whole if self._one_call else lower(q, k)
            calls = self._calls[q, k] = self._equal.setdefault(calls, calls)
        return calls


def attention(
    task: Task,
    queries: dict[Kind, Piece],
    keys: Pair,
    sums: tuple[Piece, ...],
    calls: tuple[Call, ...],
    fresh: tuple[bool, bool],
) -> Attention:
    """The attention of these queries and keys into `sums`: partial results of the queries, then of
    the keys. `fresh`: whether those of queries, and of keys, hold nothing yet. It is a backward one
    if dO is among the queries."""
    if Kind.GRAD_OUT not in queries:
        out, lse = sums
        return Attend(task, queries[Kind.Q], *keys, out, lse, calls, fresh[0])
    grad_q, grad_k, grad_v = sums
    q, grad_out, lse = (queries[kind] for kind in (Kind.Q, Kind.GRAD_OUT, Kind.LSE))
    inputs = (q, *keys, grad_out, lse, queries.get(Kind.OUT), queries.get(Kind.DELTA))
    return AttendBackward(task, *inputs, grad_q, grad_k, grad_v, calls, *fresh)
