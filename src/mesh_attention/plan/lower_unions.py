"""Lowering of masks in which a query may see several intervals, or bounds may fall.

Blocks of queries are cut where segments of the mask begin, blocks of keys where intervals end, and
both along diagonals, so that causal squares are square. A piece of queries then lies in one
segment, on which bounds never fall: what its first and its last query see tells, interval by
interval, which pieces of keys it sees whole, in part or not at all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.program import Call, CallKind
from mesh_attention.plan.rectangles import rectangles
from mesh_attention.plan.row_ranges import RowRanges, Segment

Array = NDArray[np.int64]
BlockList = list[tuple[int, int]]  # (start, stop) of consecutive positions, in row order


def union_calls(
    queries: BlockList, keys: BlockList, rows: RowRanges, most_cells: int
) -> tuple[Call, ...] | None:
    """Calls with rows counted inside the two lists; None where that would be too many cells."""
    near = _segments_of(queries, rows)
    q_cuts, k_cuts = _cuts(queries, keys, near, rows)
    q, k = _Pieces(queries, q_cuts), _Pieces(keys, k_cuts)
    if len(q.starts) * len(k.starts) > most_cells:
        return None
    lo_first, hi_first = rows.intervals(q.starts)
    lo_last, hi_last = rows.intervals(q.stops - 1)
    size = (q.stops - q.starts)[:, None]
    full, square = np.zeros((2, len(q.starts), len(k.starts)), dtype=np.bool_)
    times_seen = np.zeros(full.shape, dtype=np.int64)
    for lo0, hi0, lo1, hi1 in zip(lo_first, hi_first, lo_last, hi_last, strict=True):
        below = lo1[:, None] <= k.starts
        full |= below & (k.stops <= hi0[:, None])
        times_seen += (k.starts < hi1[:, None]) & (k.stops > lo0[:, None])
        on_edge = (hi0[:, None] == k.starts + 1) & (hi1[:, None] == k.starts + size)
        square |= below & on_edge & (k.stops == k.starts + size)
    ragged = (times_seen > 0) & ~full
    square &= ragged & (times_seen == 1)  # of another interval a square would not know

    def call(kind: CallKind, i0: int, i1: int, j0: int, j1: int) -> Call:
        return Call(kind, q.first_rows[i0], q.first_rows[i1], k.first_rows[j0], k.first_rows[j1])

    calls = [call(CallKind.FULL, *cells) for cells in rectangles(full)]
    calls += [call(CallKind.RANGE, *cells) for cells in rectangles(ragged & ~square)]
    squares = zip(*(axis.tolist() for axis in square.nonzero()), strict=True)
    return (*calls, *(call(CallKind.CAUSAL, i, i + 1, j, j + 1) for i, j in squares))


class _Pieces:
    """Blocks, each cut where it has to be."""

    def __init__(self, blocks: BlockList, cuts: list[int]) -> None:
        found = [
            piece
            for start, stop in blocks
            for piece in pairwise(
                (start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop)
            )
        ]
        self.starts, self.stops = np.array(found, dtype=np.int64).T
        self.first_rows = list(accumulate((b - a for a, b in found), initial=0))


def _segments_of(queries: BlockList, rows: RowRanges) -> list[Segment]:
    found = {at for block in queries for at in rows.segments_between(*block)}
    return [rows.segments[at] for at in sorted(found)]


def _cuts(
    queries: BlockList, keys: BlockList, near: Iterable[Segment], rows: RowRanges
) -> tuple[list[int], list[int]]:
    q_cuts, k_cuts = {rows.q_tokens}, {rows.kv_tokens}
    diagonals: list[tuple[int, int, int]] = []  # first and last query, and the key of query 0
    for s in near:
        q_cuts.update((s.start, s.stop))
        for i in s.intervals:
            k_cuts.update(
                base for base, slope in ((i.lo, i.lo_slope), (i.hi, i.hi_slope)) if not slope
            )
            if i.hi_slope:
                diagonals.append((s.start, s.stop, i.hi - 1))
    q_edges = sorted({edge for block in queries for edge in block} | q_cuts)
    k_edges = sorted({edge for block in keys for edge in block} | {rows.kv_tokens})
    for start, stop, key in diagonals:
        inside = q_edges[bisect_left(q_edges, start) : bisect_right(q_edges, stop)]
        k_cuts.update(edge + key for edge in inside)
        between = k_edges[bisect_right(k_edges, start + key) : bisect_left(k_edges, stop + key)]
        q_cuts.update(edge - key for edge in between)
    return sorted(q_cuts), sorted(k_cuts)
