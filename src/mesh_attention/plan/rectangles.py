"""Cells of a grid, covered by few rectangles: each becomes one kernel call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.bool_]


def rectangles(cells: Cells) -> Iterator[tuple[int, int, int, int]]:
    """Disjoint rectangles (row start, stop, column start, stop) that cover the true cells.

    Each is as wide as its rows allow, and as tall as the same columns stay a whole stretch.
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
        stretches = list(_stretches(row))
        for columns in [c for c in open_since if c not in stretches]:
            yield open_since.pop(columns), i, *columns
        for columns in stretches:
            open_since.setdefault(columns, i)
    for columns, start in open_since.items():
        yield start, height, *columns


def _stretches(row: bytes) -> Iterator[tuple[int, int]]:
    """(start, stop) of the stretches of ones; searching bytes costs nothing per column."""
    start = row.find(1)
    while start >= 0:
        stop = row.find(0, start)
        stop = stop if stop >= 0 else len(row)
        yield start, stop
        start = row.find(1, stop)
