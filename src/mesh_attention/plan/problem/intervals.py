"""Many intervals at once, as arrays of their ends: joined, and cut at ranges.

Layouts and counts of pairs cut with them, and `needed_rows.py` of the methods says which rows ranks
need. `spans.py` has what few intervals need, as tuples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


def expanded(first: Array, last: Array) -> tuple[Array, Array]:
    """All pairs (i, j) with `first[i] <= j < last[i]`."""
    counts = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(counts)), counts)
    begun = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - begun[index] + first[index]


def joined(lo: Array, hi: Array) -> tuple[Array, Array]:
    """The union of intervals, in order."""
    order = np.argsort(lo, kind="stable")
    lo, reach = lo[order], np.maximum.accumulate(hi[order])
    new = np.ones(len(lo), dtype=np.bool_)
    new[1:] = lo[1:] > reach[:-1]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(lo)) - 1
    return lo[first], reach[last] if len(first) else reach


def cut(lo: Array, hi: Array, starts: Array, stops: Array) -> tuple[Array, Array, Array, Array]:
    """The parts of intervals inside ranges, which are disjoint and in order: the index of the
    interval and of the range, and the ends of the part."""
    first = np.searchsorted(stops, lo, side="right")
    index, at = expanded(first, np.searchsorted(starts, hi, side="left"))
    return index, at, np.maximum(lo[index], starts[at]), np.minimum(hi[index], stops[at])
