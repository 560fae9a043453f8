"""Lowering: a compute task becomes kernel calls (design.md, "Compute lowering").

A task is a list of query rows against a list of key rows, in buffer order. It becomes maximal
fully visible rectangles, causal squares, and row ranges only where neither fits. Both lists are cut
into blocks of consecutive positions such that every (query block, key block) cell is empty, full,
a causal square or ragged; equal neighbours are then joined into rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RowList:
    """The rows of one side of a task, in buffer order. Made once, used against many others."""

    runs: tuple[Run, ...]
    num_rows: int
    first: int  # smallest and largest position
    last: int
    blocks: tuple[tuple[int, int], ...] | None  # None: too many to look at one by one

    @staticmethod
    def of(layout: Layout, spans: Spans) -> RowList:
        runs = tuple(run for span in spans for run in layout.runs(*span))
        few = sum(run.count for run in runs) <= 4 * MAX_CALLS
        return RowList(
            runs,
            num_rows=sum(run.num_tokens for run in runs),
            first=min(run.start for run in runs),
            last=max(run.stop for run in runs) - 1,
            blocks=tuple(_merged_blocks(runs)) if few else None,
        )


def lower(q: RowList, k: RowList, rows: RowRanges) -> tuple[Call, ...]:
    """Calls for the task, with rows counted inside the two lists; empty if nothing is visible."""
    shape = _whole_task(q, k, rows)
    if shape is None:
        return ()
    whole = Call(shape, 0, q.num_rows, 0, k.num_rows)
    if shape is CallKind.FULL:
        return (whole,)
    if q.blocks is None or k.blocks is None:
        return (whole,) if visible_pairs(q.runs, k.runs, rows).any() else ()
    calls = _cells_to_calls(*_cut_along_mask(q.blocks, k.blocks, rows), rows)
    return calls if len(calls) <= MAX_CALLS else (whole,)


def _whole_task(q: RowList, k: RowList, rows: RowRanges) -> CallKind | None:
    """FULL or nothing when the outermost positions decide; RANGE when one must look closer."""
    if q.first >= rows.q_tokens or k.first >= rows.kv_tokens:
        return None
    padded = q.last >= rows.q_tokens or k.last >= rows.kv_tokens
    if rows.sees_everything:
        return CallKind.RANGE if padded else CallKind.FULL
    ends = np.array([q.first, min(q.last, rows.q_tokens - 1)], dtype=np.int64)
    lo, hi = rows.bounds(ends)
    if k.first >= hi[1] or k.last < lo[0]:
        return None
    if not padded and lo[1] <= k.first and k.last < hi[0]:
        return CallKind.FULL
    return CallKind.RANGE


Blocks = tuple[tuple[int, int], ...]


def _cut_along_mask(
    q_blocks: Blocks, k_blocks: Blocks, rows: RowRanges
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(starts, stops) of query blocks and of key blocks, in row order, cut where the mask bends."""
    low, high = min(a for a, _ in q_blocks), max(b for _, b in q_blocks)
    q_cuts = {rows.q_tokens, *(a for a, _ in q_blocks), *(b for _, b in q_blocks)}
    k_cuts = {rows.kv_tokens, *(a for a, _ in k_blocks), *(b for _, b in k_blocks)}
    k_edges = sorted(k_cuts)
    near = [s for s in rows.segments if s.start < high and low < s.stop]
    for s in near:
        q_cuts.update((s.start, s.stop))
        k_cuts.update(base for base, slope in ((s.lo, s.lo_slope), (s.hi, s.hi_slope)) if not slope)
    for s in near:
        if s.hi_slope:  # cut both sides alike along the diagonal, so that squares are square
            diagonal = s.hi - 1
            k_cuts.update(q + diagonal for q in tuple(q_cuts) if s.start <= q <= s.stop)
            q_cuts.update(k - diagonal for k in k_edges if s.start < k - diagonal < s.stop)
    return _cut(q_blocks, sorted(q_cuts)), _cut(k_blocks, sorted(k_cuts))


def _merged_blocks(runs: Iterable[Run]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for run in runs:
        for start, stop in run.blocks():
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
    return merged


def _cut(blocks: Blocks, cuts: list[int]) -> tuple[Array, Array]:
    edges = np.array(cuts, dtype=np.int64)
    table = np.array(blocks, dtype=np.int64)
    first = np.searchsorted(edges, table[:, 0], side="right")
    last = np.searchsorted(edges, table[:, 1], side="left")
    if (first == last).all():
        return table[:, 0], table[:, 1]
    starts: list[int] = []
    stops: list[int] = []
    for (start, stop), i, j in zip(blocks, first.tolist(), last.tolist(), strict=True):
        inner = cuts[i:j]
        starts += [start, *inner]
        stops += [*inner, stop]
    return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)


def _cells_to_calls(
    q: tuple[Array, Array], k: tuple[Array, Array], rows: RowRanges
) -> tuple[Call, ...]:
    q_start, q_stop = q
    k_start, k_stop = k[0][None, :], k[1][None, :]
    lo_first, hi_first = (x[:, None] for x in rows.bounds(q_start))
    lo_last, hi_last = (x[:, None] for x in rows.bounds(q_stop - 1))
    rows_in = (q_stop - q_start)[:, None]
    below = lo_last <= k_start
    full = below & (k_stop <= hi_first)
    ragged = (k_start < hi_last) & (k_stop > lo_first) & ~full
    square = ragged & below & (hi_first == k_start + 1) & (hi_last - hi_first == rows_in - 1)
    square &= k_stop - k_start == rows_in
    ragged &= ~square
    q_rows = np.concatenate([[0], np.cumsum(q_stop - q_start)]).tolist()
    k_rows = np.concatenate([[0], np.cumsum(k[1] - k[0])]).tolist()
    kinds = ((CallKind.FULL, full), (CallKind.RANGE, ragged))
    calls = [
        Call(kind, q_rows[i0], q_rows[i1], k_rows[j0], k_rows[j1])
        for kind, cells in kinds
        for i0, i1, j0, j1 in rectangles(cells)
    ]
    calls += [
        Call(CallKind.CAUSAL, q_rows[i], q_rows[i + 1], k_rows[j], k_rows[j + 1])
        for i, j in zip(*(x.tolist() for x in np.nonzero(square)), strict=True)
    ]
    return tuple(calls)


def rectangles(cells: Cells) -> Iterator[tuple[int, int, int, int]]:
    """Disjoint rectangles (row start, stop, column start, stop) that cover the true cells.

    Each is as wide as its rows allow, and as tall as the same columns stay a whole stretch.
    """
    if not cells.any():
        return
    open_since: dict[tuple[int, int], int] = {}
    changed = np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1
    for i in [0, *changed.tolist()]:
        edges = np.flatnonzero(np.diff(cells[i], prepend=False, append=False)).tolist()
        stretches = set(zip(edges[::2], edges[1::2], strict=True))
        for columns in [c for c in open_since if c not in stretches]:
            yield open_since.pop(columns), i, *columns
        for columns in sorted(stretches):
            open_since.setdefault(columns, i)
    for columns, start in open_since.items():
        yield start, len(cells), *columns
