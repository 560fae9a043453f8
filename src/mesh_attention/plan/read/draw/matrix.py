"""The assignment matrix as the programs have it (algorithm.md, section 1), as a grid of ranks.

A builder starts from an assignment; this reads one back from the tasks that ranks really hold, so
a drawing shows what will run and not what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.computed_pairs import OwnedRows, work_of
from mesh_attention.plan.language.plan import Pass, Plan

NOBODY, SEVERAL = -1, -2
MOST_PARTITIONS = 64  # a grid of more does not fit on a screen; then a corner of it is drawn
_CORNER = 32


@dataclass(frozen=True, slots=True)
class Cells:
    """`ranks[i, j]` computes Q partition i against KV partition j, or NOBODY, or SEVERAL do."""

    ranks: NDArray[np.int64]
    several: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> list[list[int | list[int] | None]]:
        """Nested lists: a rank, a list of ranks, or null where nothing is computed."""
        rows: list[list[int | list[int] | None]] = [
            [None if rank == NOBODY else rank for rank in row] for row in self.ranks.tolist()
        ]
        for (i, j), ranks in self.several.items():
            rows[i][j] = list(ranks)
        return rows


def computed_cells(
    plan: Plan,
    one: Pass,
    *,
    whole_tasks: bool = False,
    first: int | None = None,
    head: int | None = None,
) -> Cells:
    """Cells of the first `first` partitions (None: all) in which a rank computes visible pairs.

    `whole_tasks` counts every cell that a rank's tasks span, also those that the mask empties.
    `head` is the query head to look at (None: all): ranks that exchange tokens for heads share
    cells, but none of them the cells of a head.
    """
    size = plan.num_ranks if first is None else min(first, plan.num_ranks)
    ranks = np.full((size, size), NOBODY, dtype=np.int64)
    several: dict[tuple[int, int], set[int]] = {}
    for work in work_of(plan, one, whole_tasks=whole_tasks, head=head):
        rows, columns = work.q < size, work.kv < size
        q, kv = work.q[rows], work.kv[columns]
        index = np.ix_(q, kv)
        there = ranks[index]
        mine = work.pairs[np.ix_(rows, columns)] > 0
        shared = mine & (there != NOBODY) & (there != work.rank)
        for x, y in np.argwhere(shared).tolist():
            cell = (int(q[x]), int(kv[y]))
            several.setdefault(cell, {int(there[x, y])}).add(work.rank)
        ranks[index] = np.where(shared, SEVERAL, np.where(mine, work.rank, there))
    return Cells(ranks, {cell: tuple(sorted(found)) for cell, found in several.items()})


def visible_cells(plan: Plan, first: int) -> NDArray[np.bool_]:
    """Which cells of the first partitions hold any visible pair at all."""
    queries, keys = (
        OwnedRows(layout, ((0, first * layout.slots),))
        for layout in (plan.q_layout, plan.kv_layout)
    )
    visible: NDArray[np.bool_] = queries.visible_pairs(keys, plan.problem.rows) > 0
    return visible


def draw_assignment(
    plan: Plan, one: Pass, *, whole_tasks: bool = False, first: int | None = None
) -> str:
    """A row for each Q partition, a column for each KV partition, the rank that computes the cell.

    Cells that the mask empties are `.`; with `whole_tasks` they show the rank whose tasks span
    them. A visible cell that nobody computes would be `?`, one that several ranks share is `*`.
    `first` limits the grid to the first partitions; by default all up to 64, else the first 32.

       KV  0 1 2 3
      Q 0  0 1 0 1
        1  0 1 0 1
        2  2 3 2 3
        3  2 3 2 3
    """
    total = plan.num_ranks
    if first is None:
        first = total if total <= MOST_PARTITIONS else _CORNER
    size = min(first, total)
    ranks = computed_cells(plan, one, whole_tasks=whole_tasks, first=size).ranks.tolist()
    visible = visible_cells(plan, size).tolist()
    signs = [
        [_sign(rank, seen) for rank, seen in zip(row, visible_row, strict=True)]
        for row, visible_row in zip(ranks, visible, strict=True)
    ]
    width = len(str(total - 1))
    more = " ..." if size < total else ""
    lines = [_line("KV", "", [str(j) for j in range(size)], width) + more]
    for i, row in enumerate(signs):
        lines.append(_line("" if i else "Q", str(i), row, width) + more)
    if more:
        lines.append(f"{'':>3}...")
        lines.append(f"the first {size} of {total} partitions; `first` sets how many are drawn")
    legend = _legend({sign for row in signs for sign in row})
    return "\n".join([*lines, *legend])


def _line(side: str, number: str, cells: list[str], width: int) -> str:
    label = f"{side:>3} {number:>{width}}" if number else f"{side:>{4 + width}}"
    return f"{label}  {' '.join(f'{cell:>{width}}' for cell in cells)}"


def _sign(rank: int, visible: bool) -> str:
    if rank == NOBODY:
        return "?" if visible else "."
    return "*" if rank == SEVERAL else str(rank)


def _legend(used: set[str]) -> list[str]:
    meanings = {
        ".": ". the mask shows nothing here",
        "*": "* several ranks share this cell",
        "?": "? visible, but computed by nobody",
    }
    return [meaning for sign, meaning in meanings.items() if sign in used]
