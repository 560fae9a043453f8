"""Cells of a grid, covered by few rectangles: each becomes one kernel call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.program import Call, CallKind

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


@lru_cache(maxsize=1024)
def full_calls(
    picture: bytes, q_rows: tuple[int, ...], k_rows: tuple[int, ...]
) -> tuple[Call, ...]:
    """Of cells that are seen whole (1) or not at all (0), row by row."""
    cells = np.frombuffer(picture, dtype=np.bool_).reshape(len(q_rows) - 1, len(k_rows) - 1)
    return tuple(
        Call(CallKind.FULL, q_rows[i0], q_rows[i1], k_rows[j0], k_rows[j1])
        for i0, i1, j0, j1 in rectangles(cells)
    )
