"""How much each tile of the query-key matrix shows: by intervals, exactly, without a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, visible_pairs


def pairs_of_tiles(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: tuple[int, int], degree: int = 1
) -> NDArray[np.int64]:
    """Visible pairs of the tile of each row and column of units of `degree` ranks, (b, a); of
    contiguous or zigzag layouts."""
    a, b = tile
    q_runs = [run for row in range(b) for run in _runs(q_layout, row * a, 1, a, degree)]
    k_runs = [run for column in range(a) for run in _runs(kv_layout, column, a, b, degree)]
    pairs = visible_pairs(q_runs, k_runs, rows)
    parts = len(q_runs) // b
    summed: NDArray[np.int64] = pairs.reshape(b, parts, a, parts).sum((1, 3))
    return summed


def _runs(layout: Layout, first: int, step: int, count: int, degree: int) -> list[Run]:
    """The positions of units `first`, `first + step` and so on: as few runs as there are blocks of
    a rank."""
    size, units = layout.slots * degree, layout.num_ranks // degree
    starts = [first * size]
    if layout.kind is LayoutKind.ZIGZAG:
        size //= 2
        last = 2 * units - 1 - first - (count - 1) * step
        starts = [first * size, last * size]
    if step == 1:
        return [Run(start, count * size) for start in starts]
    return [Run(start, size, step * size, count) for start in starts]
