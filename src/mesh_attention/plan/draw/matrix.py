"""The assignment matrix as a grid of rank numbers."""

from __future__ import annotations

from mesh_attention.plan.draw.cells import NOBODY, SEVERAL, computed_cells, visible_cells
from mesh_attention.plan.plan import Pass, Plan

__all__ = ["MOST_PARTITIONS", "draw_assignment"]

MOST_PARTITIONS = 64  # a grid of more does not fit on a screen; then a corner of it is drawn
_CORNER = 32


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
