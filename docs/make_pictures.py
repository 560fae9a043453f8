"""Draws docs/pictures/methods.png: who computes what under ring, Ulysses and mesh, and what moves.

    python docs/make_pictures.py

Cells are read from the programs of real plans, and the volumes below them are counted from plans.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.cost.pictures import pyplot
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.draw import computed_cells

PICTURE = Path(__file__).with_name("pictures") / "methods.png"
RANKS = 16
SIZES = (16, 64, 256)
PANELS = {
    "ring": "Ring: a row of the query-key matrix\n(any number of ranks)",
    "ulysses": "Ulysses: all of it, for some heads\n(no more ranks than heads)",
    "mesh": "Mesh: a tile of it\n(any number of ranks)",
}


def main() -> None:
    plt = pyplot()
    figure, axes = plt.subplots(
        2, len(PANELS), figsize=(13, 6.1), gridspec_kw={"height_ratios": (5, 1)}
    )
    received = {method: [partitions(method, ranks) for ranks in SIZES] for method in PANELS}
    widest = max(map(max, received.values()))
    for (above, below), (method, title) in zip(axes.T, PANELS.items(), strict=True):
        draw_cells(above, plt, method)
        above.set_title(title, fontsize=13)
        draw_bars(below, received[method], widest)
    figure.text(
        *(0.5, 0.015),
        "Bars: what a rank receives in the forward pass, in partitions of Q. "
        "Numbers in cells: the rank, of 16, that computes them; rank 0 in colour.",
        ha="center",
        fontsize=11,
    )
    figure.subplots_adjust(left=0.075, right=0.985, top=0.91, bottom=0.08, wspace=0.24, hspace=0.05)
    figure.savefig(PICTURE, dpi=100)


def forward(method: str, ranks: int) -> Plan:
    problem = Problem(q_tokens=8 * ranks, num_heads=max(SIZES), head_dim=8)
    return make_plan(problem, ranks, method=method, directions=(Direction.FORWARD,))


def partitions(method: str, ranks: int) -> float:
    return float(count(forward(method, ranks))[Direction.FORWARD].units_total) / ranks


def draw_cells(axis: Any, plt: Any, method: str) -> None:
    """The matrix; where ranks share every cell by heads, a sheet for each of them, rank 0 first."""
    plan = forward(method, RANKS)
    cells = computed_cells(plan, plan.forward)
    sheets = RANKS if cells.several else 1
    step = 0.2
    side = (RANKS - (sheets - 1) * step) / RANKS
    colours = plt.get_cmap("tab20").colors

    def cell(rank: int, left: float, top: float, size: float) -> None:
        faded = [1 - (1 - part) * (1.0 if rank == 0 else 0.35) for part in colours[rank]]
        axis.add_patch(plt.Rectangle((left, top), size, size, fc=faded, ec="white", lw=0.5))

    for sheet in reversed(range(1, sheets)):
        cell(sheet, sheet * step, (sheets - 1 - sheet) * step, RANKS * side)
    for i in range(RANKS):
        for j in range(RANKS):
            rank = 0 if sheets > 1 else int(cells.ranks[i, j])
            left, top = j * side, (sheets - 1) * step + i * side
            cell(rank, left, top, side)
            axis.text(
                *(left + side / 2, top + side * 0.55, str(rank)),
                color="white" if rank == 0 else "#444444",
                ha="center",
                va="center",
                fontsize=9 * side,
            )
    axis.set_xlim(0, RANKS)
    axis.set_ylim(RANKS, 0)
    axis.set_aspect("equal")
    axis.axis("off")


def draw_bars(axis: Any, received: list[float], widest: float) -> None:
    axis.barh([f"{ranks} ranks" for ranks in SIZES], received, color="#1f77b4")
    for at, value in enumerate(received):
        axis.text(value + widest / 50, at, f"{value:.3g}", va="center", fontsize=12)
    axis.set_xlim(0, widest * 1.25)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=11, pad=2)
    for side in axis.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    main()
