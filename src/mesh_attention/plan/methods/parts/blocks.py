"""Blocks of rows, and the grid of cells between blocks of queries and blocks of keys.

`RowList` is one side of a compute task: its rows as blocks of consecutive positions. It depends on
the layout alone, so it is made once for all masks, and for all tasks with these rows. A cell of the
grid is one block of queries against one block of keys; `grid_calls` and `full_calls` cover the
visible cells by few rectangles, each of which becomes one kernel call. Used by the lowering.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.program import Call, CallKind
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.spans import Spans

# A list of more blocks is not looked at block by block: token stripes would take seconds. Zigzag
# halves of thousands of ranks, gathered by one rank that has two blocks of queries, are few calls
# and must be found.
MAX_BLOCKS = 4096
_ONES = re.compile(rb"\x01+")

Array = NDArray[np.int64]
Cells = NDArray[np.bool_]
_NO_EDGES = np.zeros((2, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """The rows of one side of a task, in buffer order."""

    layout: Layout
    spans: Spans
    num_rows: int
    first: int  # smallest and largest position
    last: int
    blocks: Spans  # of consecutive positions, in row order; none: too many to look at one by one
    edges: Array  # their starts and stops
    first_rows: tuple[int, ...]  # of each block, and one past the last row

    @staticmethod
    def of(layout: Layout, spans: Spans) -> RowList:
        num_rows = sum([stop - start for start, stop in spans])
        edges = layout.edges_of(spans)
        if edges is None or len(edges[0]) > MAX_BLOCKS:
            runs = [run for span in spans for run in layout.runs(*span)]
            if sum(run.count for run in runs) > MAX_BLOCKS:
                first = min(run.start for run in runs)
                last = max(run.stop for run in runs) - 1
                return RowList(layout, spans, num_rows, first, last, (), _NO_EDGES, ())
            edges = np.array([block for run in runs for block in run.blocks()], dtype=np.int64).T
        edges = _joined(edges)
        starts, stops = edges.tolist()
        first_rows = (0, *np.cumsum(edges[1] - edges[0]).tolist())
        blocks = tuple(zip(starts, stops, strict=True))
        first, last = min(starts), max(stops) - 1
        return RowList(layout, spans, num_rows, first, last, blocks, edges, first_rows)


def _joined(edges: Array) -> Array:
    """Blocks in order, without empty ones, neighbours that touch joined."""
    starts, stops = edges[:, edges[0] < edges[1]]
    apart = starts[1:] != stops[:-1]
    return np.stack([starts[np.append(True, apart)], stops[np.append(apart, True)]])


row_list = lru_cache(maxsize=64)(RowList.of)  # rows stay where they are when a mask changes


def rectangles(cells: Cells) -> Iterator[tuple[int, int, int, int]]:
    """Disjoint rectangles (row start, stop, column start, stop) that cover the true cells.

    Each is as wide as its rows allow, and as tall as the same columns stay a whole range.
    """
    height, width = cells.shape
    data = cells.tobytes()
    above = bytes(width)
    open_since: dict[tuple[int, int], int] = {}
    for i in range(height):
        row = data[i * width : (i + 1) * width]
        if row == above:
            continue
        above = row
        ranges = [match.span() for match in _ONES.finditer(row)]
        for columns in [c for c in open_since if c not in ranges]:
            yield open_since.pop(columns), i, *columns
        for columns in ranges:
            open_since.setdefault(columns, i)
    for columns, start in open_since.items():
        yield start, height, *columns


@lru_cache(maxsize=1024)
def full_calls(
    picture: bytes, q_rows: tuple[int, ...], k_rows: tuple[int, ...]
) -> tuple[Call, ...]:
    """Calls for cells of which all is visible (1) or nothing (0), row by row."""
    cells = np.frombuffer(picture, dtype=np.bool_).reshape(len(q_rows) - 1, len(k_rows) - 1)
    return grid_calls(cells, None, None, q_rows, k_rows)


def grid_calls(
    full: Cells,
    ragged: Cells | None,
    square: Cells | None,
    q_rows: Sequence[int],
    k_rows: Sequence[int],
    most: int | None = None,
) -> tuple[Call, ...]:
    """Calls for cells that are visible whole, in part, and as causal squares; a square may also be
    among the ragged cells. `q_rows`, `k_rows`: the first row of each block, and the end. `most`:
    the first so many are enough."""
    rectangles_of = {CallKind.FULL: rectangles(full)}
    if ragged is not None and square is not None:
        rectangles_of[CallKind.RANGE] = rectangles(ragged & ~square)
        squares = zip(*(axis.tolist() for axis in square.nonzero()), strict=True)
        rectangles_of[CallKind.CAUSAL] = ((i, i + 1, j, j + 1) for i, j in squares)
    calls = (
        Call(kind, q_rows[i0], q_rows[i1], k_rows[j0], k_rows[j1])
        for kind, cells in rectangles_of.items()
        for i0, i1, j0, j1 in cells
    )
    return tuple(islice(calls, most))
