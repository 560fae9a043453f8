"""Lowering: a compute task becomes kernel calls (design.md, "Compute lowering").

A task is a list of query rows against a list of key rows, in buffer order. It becomes maximal
fully visible rectangles, causal squares, and row ranges only where neither fits. Both lists are cut
into blocks of consecutive positions such that every (query block, key block) cell is empty, full,
a causal square or ragged; equal neighbours are then joined into rectangles (`blocks.py`).

In most masks bounds never fall as queries grow (`lower_unions.py` lowers the others), so the first
and the last query alone show which key blocks all queries see and which none does; likewise for
queries. Only the few *open* blocks in between are looked at closely, because planning for thousands
of ranks lowers tens of thousands of tasks. Of a ring's n^2 tasks all but a few have no open cell at
all, and a few comparisons decide them. Builders ask `Lowerings`, one for each plan.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from mesh_attention.plan.language.program import Call, CallKind
from mesh_attention.plan.methods.parts.blocks import (
    Array,
    Blocks,
    Cells,
    RowList,
    full_calls,
    grid_calls,
    row_list,
)
from mesh_attention.plan.methods.parts.lower_unions import SegmentPieces, segments_near, union_calls
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import visible_pairs

# A launch costs tens of microseconds: a task that would shatter into more calls than this (token
# stripes, hundreds of tiny documents) is one row-range call instead.
MAX_CALLS = 64
# More pairs of blocks are not looked at one by one, nor more cells, of which arrays are made.
MAX_PAIRS = (4 * MAX_CALLS) ** 2
MAX_CELLS = 64 * MAX_PAIRS

# Ranges of blocks that are alike: state 0 or 1 as long as it lasts, open blocks one by one.
_ALIKE = re.compile(rb"\x00+|\x01+|[\x02\x03]")


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Key intervals that some query sees and that all queries see, for each of many query sets."""

    some_lo: Array
    some_hi: Array
    all_lo: Array
    all_hi: Array

    @staticmethod
    def of(first: Array, last: Array, rows: RowRanges) -> Sight:
        """Of the sets of consecutive queries with these first and last ones."""
        lo, hi = rows.bounds(np.concatenate([first, last]))
        n = len(first)
        return Sight(some_lo=lo[:n], some_hi=hi[n:], all_lo=lo[n:], all_hi=hi[:n])


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The query rows of a task, with the keys that they see under a mask."""

    list: RowList
    rows: RowRanges
    some: tuple[int, int] = (0, 0)  # the keys that some query sees, and that all see
    all: tuple[int, int] = (0, 0)
    sight: Sight | None = None  # block by block
    few: tuple[tuple[int, int, int, int], ...] | None = None  # of few blocks without padding
    pieces: SegmentPieces | None = None  # instead of these, for masks whose bounds may fall

    @staticmethod
    def of(q: RowList, rows: RowRanges) -> Queries:
        last = min(q.last, rows.q_tokens - 1)  # padding sees nothing
        if not rows.ordered:
            some = rows.hull(q.first, last + 1)
            pieces = SegmentPieces.of(q.blocks.pairs(), rows) if q.blocks else None
            return Queries(q, rows, some, pieces=pieces)
        lo, hi = (x.tolist() for x in rows.bounds(np.array([q.first, last], dtype=np.int64)))
        sight = Sight.of(q.blocks.starts, q.blocks.stops - 1, rows) if q.blocks else None
        few = None
        if sight and q.blocks and q.blocks.few and q.last < rows.q_tokens:
            sides = (sight.all_lo, sight.all_hi, sight.some_lo, sight.some_hi)
            few = tuple(zip(*(side.tolist() for side in sides), strict=True))
        return Queries(q, rows, (lo[0], hi[1]), (lo[1], hi[0]), sight, few)


def lower(q: Queries, k: RowList) -> tuple[Call, ...]:
    """Calls for the task, with rows counted inside the two lists; empty if nothing is visible."""
    real = q.list.first < q.rows.q_tokens
    if not real or k.first >= q.some[1] or k.last < q.some[0]:
        return ()
    if q.list.last < q.rows.q_tokens and q.all[0] <= k.first and k.last < q.all[1]:
        return (Call(CallKind.FULL, 0, q.list.num_rows, 0, k.num_rows),)
    whole = Call(CallKind.RANGE, 0, q.list.num_rows, 0, k.num_rows)
    blocks, calls = q.list.blocks, None
    if blocks is None or k.blocks is None or len(blocks.starts) * len(k.blocks.starts) > MAX_PAIRS:
        pass
    elif q.pieces is not None:
        calls = union_calls(q.pieces, k.blocks.pairs(), k.blocks.first_rows, q.rows, MAX_PAIRS)
    else:
        assert q.sight is not None
        picture = _picture(q, k.blocks)
        if picture is not None:
            return full_calls(picture, blocks.first_rows, k.blocks.first_rows)
        calls = _lower_blocks(q, blocks, q.sight, k.blocks)
    if calls is None:
        return (whole,) if visible_pairs(q.list.runs, k.runs, q.rows).any() else ()
    return (whole,) if len(calls) > MAX_CALLS else calls


def _picture(q: Queries, k_blocks: Blocks) -> bytes | None:
    """For each (query block, key block) 1 if all is visible and 0 if nothing is, row by row.

    None where a cell is open, or the blocks are many: then they must be looked at closely.
    """
    if q.few is None or k_blocks.few is None:
        return None
    cells = bytearray()
    for all_lo, all_hi, some_lo, some_hi in q.few:
        for start, stop in k_blocks.few:
            if all_lo <= start and stop <= all_hi:
                cells.append(1)
            elif stop <= some_lo or some_hi <= start:
                cells.append(0)
            else:
                return None
    return bytes(cells)


def _lower_blocks(
    q: Queries, q_blocks: Blocks, sight: Sight, k_blocks: Blocks
) -> tuple[Call, ...] | None:
    seen_by_all = (k_blocks.starts >= q.all[0]) & (k_blocks.stops <= q.all[1])
    seen_by_none = (k_blocks.starts >= q.some[1]) | (k_blocks.stops <= q.some[0])
    k_open = ~(seen_by_all | seen_by_none)
    open_keys = [k_blocks.block(j) for j in np.flatnonzero(k_open).tolist()]
    low, high = min((a for a, _ in open_keys), default=0), max((b for _, b in open_keys), default=0)
    sees_all = (sight.all_lo <= low) & (sight.all_hi >= high)
    sees_none = (sight.some_hi <= low) | (sight.some_lo >= high)
    real = q_blocks.stops <= q.rows.q_tokens  # padding does not even see the keys that all see
    q_open = ~((sees_all | sees_none) & real)
    q_cuts, k_cuts = _cuts(q_blocks, open_keys, q.rows)
    strips = _Strips.of(q_blocks, sees_all, q_open, q_cuts)
    k_strips = _Strips.of(k_blocks, seen_by_all, k_open, k_cuts)
    if len(strips.starts) * len(k_strips.starts) > MAX_CELLS:
        return None
    return _cells_to_calls(strips, k_strips, q.rows)


def _cuts(
    q: Blocks, k_blocks: list[tuple[int, int]], rows: RowRanges
) -> tuple[list[int], list[int]]:
    """Where the mask bends inside query blocks, and inside these key blocks."""
    q_cuts, k_cuts = {rows.q_tokens}, {rows.kv_tokens}
    near = segments_near(q.few or ((q.edges[0], q.edges[-1]),), rows)
    k_edges = sorted(
        {edge for block in k_blocks for edge in (*block, min(rows.kv_tokens, block[1]))}
    )
    for s in near:
        q_cuts.update((s.start, s.stop))
        (interval,) = s.intervals
        ends = (interval.lo, interval.lo_slope), (interval.hi, interval.hi_slope)
        k_cuts.update(base for base, slope in ends if not slope)
    bends = sorted(q_cuts)
    for s in near if k_blocks else ():
        (interval,) = s.intervals
        if interval.hi_slope:  # cut both sides alike along the diagonal: squares stay square
            diagonal = interval.hi - 1
            low = bisect_left(q.edges, max(s.start, k_edges[0] - diagonal))
            high = bisect_right(q.edges, min(s.stop, k_edges[-1] - diagonal))
            k_cuts.update(edge + diagonal for edge in q.edges[low:high])
            inside = bends[bisect_left(bends, s.start) : bisect_right(bends, s.stop)]
            k_cuts.update(cut + diagonal for cut in inside)
            q_cuts.update(k - diagonal for k in k_edges if s.start < k - diagonal < s.stop)
    return sorted(q_cuts), sorted(k_cuts)


@dataclass(frozen=True, slots=True, eq=False)
class _Strips:
    """Rows or columns of cells: the pieces of open blocks, and neighbours that are alike as one.

    Blocks are alike if they see (or are seen by) the same of the other side, so the positions of
    the first stand for all of them.
    """

    starts: Array
    stops: Array
    first_rows: list[int]  # of each strip, and one past the last row

    @staticmethod
    def of(blocks: Blocks, state: Cells, is_open: Cells, cuts: list[int]) -> _Strips:
        pieces: list[tuple[int, int]] = []
        first_rows: list[int] = []
        codes = state.astype(np.uint8) | (is_open.astype(np.uint8) << 1)
        for strip in _ALIKE.finditer(codes.tobytes()):
            i = strip.start()
            start, stop = blocks.block(i)
            inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)] if is_open[i] else []
            for a, b in pairwise((start, *inner, stop)):
                pieces.append((a, b))
                first_rows.append(blocks.first_rows[i] + a - start)
        starts, stops = np.array(pieces, dtype=np.int64).T
        return _Strips(starts, stops, [*first_rows, blocks.first_rows[-1]])


def _cells_to_calls(q: _Strips, k: _Strips, rows: RowRanges) -> tuple[Call, ...]:
    sight = Sight.of(q.starts, q.stops - 1, rows)
    all_lo, all_hi = sight.all_lo[:, None], sight.all_hi[:, None]
    some_lo, some_hi = sight.some_lo[:, None], sight.some_hi[:, None]
    below = all_lo <= k.starts
    full = below & (k.stops <= all_hi)
    ragged = (k.starts < some_hi) & (k.stops > some_lo) & ~full
    if not ragged.any():
        return grid_calls(full, None, None, q.first_rows, k.first_rows)
    size = (q.stops - q.starts)[:, None]
    on_edge = (all_hi == k.starts + 1) & (some_hi == k.starts + size)
    square = ragged & below & on_edge & (k.stops == k.starts + size)
    return grid_calls(full, ragged, square, q.first_rows, k.first_rows)


class Lowerings:
    """Calls of the tasks of a plan, each lowered once: passes and ranks ask for the same."""

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
