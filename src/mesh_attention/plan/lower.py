"""Lowering: a compute task becomes kernel calls (design.md, "Compute lowering").

A task is a list of query rows against a list of key rows, in buffer order. It becomes maximal
fully visible rectangles, causal squares, and row ranges only where neither fits. Both lists are cut
into blocks of consecutive positions such that every (query block, key block) cell is empty, full,
a causal square or ragged; equal neighbours are then joined into rectangles.

Bounds never fall as queries grow, so the first and the last query alone show which key blocks all
queries see and which none does. Only the few blocks in between are looked at closely: planning for
thousands of ranks lowers tens of thousands of tasks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.layout import Layout, Spans
from mesh_attention.plan.mask import RowRanges
from mesh_attention.plan.program import Call, CallKind
from mesh_attention.plan.runs import Run, visible_pairs

__all__ = ["MAX_CALLS", "RowList", "lower", "rectangles"]

# A launch costs tens of microseconds: a task that would shatter into more calls than this (token
# stripes, hundreds of tiny documents) is one row-range call instead.
MAX_CALLS = 64

Array = NDArray[np.int64]
Cells = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of consecutive positions, in row order."""

    starts: Array
    stops: Array
    edges: tuple[int, ...]  # all starts and stops, sorted

    @staticmethod
    def of(blocks: Iterable[tuple[int, int]]) -> Blocks:
        table = np.array(list(blocks), dtype=np.int64)
        return Blocks(table[:, 0], table[:, 1], tuple(np.unique(table).tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """The rows of one side of a task, in buffer order. Made once, used against many others."""

    runs: tuple[Run, ...]
    num_rows: int
    first: int  # smallest and largest position
    last: int
    blocks: Blocks | None  # None: too many to look at one by one

    @staticmethod
    def of(layout: Layout, spans: Spans) -> RowList:
        runs = tuple(run for span in spans for run in layout.runs(*span))
        few = sum(run.count for run in runs) <= 4 * MAX_CALLS
        return RowList(
            runs,
            num_rows=sum(run.num_tokens for run in runs),
            first=min(run.start for run in runs),
            last=max(run.stop for run in runs) - 1,
            blocks=Blocks.of(_merged_blocks(runs)) if few else None,
        )


def _merged_blocks(runs: Iterable[Run]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for run in runs:
        for start, stop in run.blocks():
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
    return merged


@dataclass(frozen=True, slots=True)
class Sight:
    """Keys that some query of a task sees, and the keys that all its queries see."""

    some: tuple[int, int]
    all: tuple[int, int]

    @staticmethod
    def of(q: RowList, rows: RowRanges) -> Sight:
        first, last = q.first, min(q.last, rows.q_tokens - 1)
        s, t = rows.segment_at(first), rows.segment_at(last)
        lo_first, hi_first = s.lo + s.lo_slope * first, s.hi + s.hi_slope * first
        lo_last, hi_last = t.lo + t.lo_slope * last, t.hi + t.hi_slope * last
        return Sight((lo_first, hi_last), (lo_last, hi_first))


def lower(q: RowList, k: RowList, rows: RowRanges) -> tuple[Call, ...]:
    """Calls for the task, with rows counted inside the two lists; empty if nothing is visible."""
    if q.first >= rows.q_tokens or k.first >= rows.kv_tokens:
        return ()
    sight = Sight.of(q, rows)
    if k.first >= sight.some[1] or k.last < sight.some[0]:
        return ()
    if q.last < rows.q_tokens and sight.all[0] <= k.first and k.last < sight.all[1]:
        return (Call(CallKind.FULL, 0, q.num_rows, 0, k.num_rows),)
    whole = Call(CallKind.RANGE, 0, q.num_rows, 0, k.num_rows)
    if q.blocks is None or k.blocks is None:
        return (whole,) if visible_pairs(q.runs, k.runs, rows).any() else ()
    calls = _lower_blocks(q.blocks, k.blocks, sight, rows)
    return calls if len(calls) <= MAX_CALLS else (whole,)


@dataclass(slots=True)
class Columns:
    """Key blocks as columns of cells. Where all queries agree, several blocks make one column."""

    starts: list[int]
    stops: list[int]
    sizes: list[int]  # rows; not always stop - start, as a column of many blocks has gaps

    def add(self, start: int, stop: int, size: int) -> None:
        self.starts.append(start)
        self.stops.append(stop)
        self.sizes.append(size)


def _lower_blocks(q: Blocks, k: Blocks, sight: Sight, rows: RowRanges) -> tuple[Call, ...]:
    seen_by_all = (k.starts >= sight.all[0]) & (k.stops <= sight.all[1])
    seen_by_none = (k.starts >= sight.some[1]) | (k.stops <= sight.some[0])
    open_blocks = np.flatnonzero(~(seen_by_all | seen_by_none)).tolist()
    q_cuts, k_cuts = _cuts(q, [(int(k.starts[i]), int(k.stops[i])) for i in open_blocks], rows)
    columns = Columns([], [], [])
    ends = np.flatnonzero(seen_by_all[1:] != seen_by_all[:-1]) + 1
    bounds = sorted({0, len(k.starts), *ends.tolist(), *open_blocks, *(i + 1 for i in open_blocks)})
    sizes = [0, *np.cumsum(k.stops - k.starts).tolist()]
    for i, j in pairwise(bounds):
        if seen_by_all[i]:
            columns.add(*sight.all, sizes[j] - sizes[i])
        elif seen_by_none[i]:
            columns.add(rows.kv_tokens + 1, rows.kv_tokens + 1, sizes[j] - sizes[i])
        else:
            for start, stop in _pieces(int(k.starts[i]), int(k.stops[i]), k_cuts):
                columns.add(start, stop, stop - start)
    return _cells_to_calls(_cut(q, q_cuts), columns, rows)


def _cuts(
    q: Blocks, k_blocks: list[tuple[int, int]], rows: RowRanges
) -> tuple[list[int], list[int]]:
    """Where the mask bends inside query blocks, and inside these key blocks."""
    first, last = q.edges[0], q.edges[-1]
    q_cuts, k_cuts = {rows.q_tokens}, {rows.kv_tokens}
    near = [s for s in rows.segments if s.start < last and first < s.stop]
    k_edges = sorted({edge for block in k_blocks for edge in (*block, min(rows.kv_tokens, block[1]))})
    for s in near:
        q_cuts.update((s.start, s.stop))
        k_cuts.update(base for base, slope in ((s.lo, s.lo_slope), (s.hi, s.hi_slope)) if not slope)
    for s in near if k_blocks else ():
        if s.hi_slope:  # cut both sides alike along the diagonal, so that squares are square
            diagonal = s.hi - 1
            low = bisect_left(q.edges, max(s.start, k_edges[0] - diagonal))
            high = bisect_right(q.edges, min(s.stop, k_edges[-1] - diagonal))
            k_cuts.update(edge + diagonal for edge in q.edges[low:high])
            k_cuts.update(cut + diagonal for cut in q_cuts if s.start <= cut <= s.stop)
            q_cuts.update(k - diagonal for k in k_edges if s.start < k - diagonal < s.stop)
    return sorted(q_cuts), sorted(k_cuts)


def _pieces(start: int, stop: int, cuts: list[int]) -> Iterator[tuple[int, int]]:
    inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
    return pairwise((start, *inner, stop))


def _cut(blocks: Blocks, cuts: list[int]) -> tuple[Array, Array]:
    edges = np.array(cuts, dtype=np.int64)
    first = np.searchsorted(edges, blocks.starts, side="right")
    last = np.searchsorted(edges, blocks.stops, side="left")
    if (first == last).all():
        return blocks.starts, blocks.stops
    whole = zip(blocks.starts.tolist(), blocks.stops.tolist(), strict=True)
    table = np.array([piece for block in whole for piece in _pieces(*block, cuts)], dtype=np.int64)
    return table[:, 0], table[:, 1]


def _cells_to_calls(
    q: tuple[Array, Array], columns: Columns, rows: RowRanges
) -> tuple[Call, ...]:
    q_start, q_stop = q
    heights = q_stop - q_start
    k_start, k_stop = np.array([columns.starts, columns.stops], dtype=np.int64)
    lo, hi = rows.bounds(np.concatenate([q_start, q_stop - 1]))
    (lo_first, lo_last), (hi_first, hi_last) = lo.reshape(2, -1, 1), hi.reshape(2, -1, 1)
    below = lo_last <= k_start
    full = below & (k_stop <= hi_first)
    ragged = (k_start < hi_last) & (k_stop > lo_first) & ~full
    q_rows = [0, *np.cumsum(heights).tolist()]
    k_rows = [0, *accumulate(columns.sizes)]

    def joined(kind: CallKind, cells: Cells) -> list[Call]:
        return [
            Call(kind, q_rows[i0], q_rows[i1], k_rows[j0], k_rows[j1])
            for i0, i1, j0, j1 in rectangles(cells)
        ]

    calls = joined(CallKind.FULL, full)
    if not ragged.any():
        return tuple(calls)
    rows_in = heights[:, None]
    square = ragged & below & (hi_first == k_start + 1) & (hi_last - hi_first == rows_in - 1)
    square &= k_stop - k_start == rows_in
    calls += joined(CallKind.RANGE, ragged & ~square)
    calls += [
        Call(CallKind.CAUSAL, q_rows[i], q_rows[i + 1], k_rows[j], k_rows[j + 1])
        for i, j in np.argwhere(square).tolist()
    ]
    return tuple(calls)


def rectangles(cells: Cells) -> Iterator[tuple[int, int, int, int]]:
    """Disjoint rectangles (row start, stop, column start, stop) that cover the true cells.

    Each is as wide as its rows allow, and as tall as the same columns stay a whole stretch.
    """
    if not cells.any():
        return
    num_rows, num_columns = cells.shape
    changed = [0, *(np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1).tolist()]
    framed = np.zeros((len(changed), num_columns + 2), dtype=np.bool_)
    framed[:, 1:-1] = cells[changed]
    edges: list[list[int]] = [[] for _ in changed]
    for at, column in np.argwhere(framed[:, 1:] != framed[:, :-1]).tolist():
        edges[at].append(column)
    open_since: dict[tuple[int, int], int] = {}
    for i, row_edges in zip(changed, edges, strict=True):
        stretches = list(zip(row_edges[::2], row_edges[1::2], strict=True))
        for columns in [c for c in open_since if c not in stretches]:
            yield open_since.pop(columns), i, *columns
        for columns in stretches:
            open_since.setdefault(columns, i)
    for columns, start in open_since.items():
        yield start, num_rows, *columns
