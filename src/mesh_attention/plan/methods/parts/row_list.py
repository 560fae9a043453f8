"""The rows of one side of a compute task, as blocks of consecutive positions.

They depend on the layout alone, so they are made once for all masks and for all tasks that have
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.runs import Run
from mesh_attention.plan.problem.spans import Spans

# More blocks of a list are not looked at one by one: token stripes, which would take seconds.
# Zigzag halves of thousands of ranks, gathered by one rank that has two blocks of queries, are few
# calls and must be found.
MAX_BLOCKS = 4096

# Up to so many blocks a side are compared one by one; for more, arrays are faster.
_FEW_BLOCKS = 4

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of consecutive positions, in row order."""

    starts: Array
    stops: Array
    first_rows: tuple[int, ...]  # of each block, and one past the last row
    edges: list[int]  # all starts and stops, sorted
    few: tuple[tuple[int, int], ...] | None  # (start, stop) of each, unless they are many

    @staticmethod
    def of(blocks: list[tuple[int, int]]) -> Blocks:
        starts, stops = np.array(blocks, dtype=np.int64).T
        first_rows = (0, *np.cumsum(stops - starts).tolist())
        edges = sorted({e for block in blocks for e in block})
        few = tuple(blocks) if len(blocks) <= _FEW_BLOCKS else None
        return Blocks(starts, stops, first_rows, edges, few)

    def block(self, i: int) -> tuple[int, int]:
        return int(self.starts[i]), int(self.stops[i])

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """The rows of one side of a task, in buffer order. Made once, used against many others."""

    layout: Layout
    spans: Spans
    num_rows: int
    first: int  # smallest and largest position
    last: int
    blocks: Blocks | None  # None: too many to look at one by one

    @staticmethod
    def of(layout: Layout, spans: Spans) -> RowList:
        num_rows = sum([stop - start for start, stop in spans])
        found = layout.blocks_of(spans) if len(spans) < MAX_BLOCKS // 2 else None
        if found is not None:
            blocks = Blocks.of(joined_blocks(found))
            return RowList(layout, spans, num_rows, blocks.edges[0], blocks.edges[-1] - 1, blocks)
        runs = runs_of(layout, spans)
        few = sum(run.count for run in runs) <= MAX_BLOCKS
        return RowList(
            *(layout, spans, num_rows),
            first=min(run.start for run in runs),
            last=max(run.stop for run in runs) - 1,
            blocks=Blocks.of(joined_blocks(b for r in runs for b in r.blocks())) if few else None,
        )

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.layout, self.spans)


def runs_of(layout: Layout, spans: Spans) -> list[Run]:
    return [run for span in spans for run in layout.runs(*span)]


@lru_cache(maxsize=64)  # rows stay where they are when a mask changes
def row_list(layout: Layout, spans: Spans) -> RowList:
    return RowList.of(layout, spans)


def joined_blocks(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those made one that follow each other."""
    merged: list[tuple[int, int]] = []
    first = last = -1
    for start, stop in blocks:
        if start == last:
            last = stop
        else:
            merged.append((first, last))
            first, last = start, stop
    return [*merged[1:], (first, last)]
