"""Runs the demonstration and draws its pictures; `mesh-attention demo` prints what it returns.

Pictures need matplotlib (extra `plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh_attention.cluster.gantt import draw_gantt
from mesh_attention.cluster.planning import plan_on
from mesh_attention.cluster.simulate import simulate
from mesh_attention.demo.ranks import CASES, NUM_RANKS, Case, Outcome, run_cases
from mesh_attention.files import replacing
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plots import pyplot

TOLERANCE = 1e-10
CLUSTER = "hgx-h100"


@dataclass(frozen=True, slots=True)
class Row:
    case: Case
    outcome: Outcome

    @property
    def ok(self) -> bool:
        o = self.outcome
        exact = max(o.output_error, o.gradient_error) <= TOLERANCE
        return exact and o.counted_units == o.planned_units == self.case.paper_units

    def to_json(self) -> dict[str, Any]:
        return {"case": self.case.title, "paper_units": self.case.paper_units, "ok": self.ok} | (
            asdict(self.outcome)
        )


def run_demo(folder: Path, report: Callable[[str, int], None]) -> tuple[list[Row], list[Path]]:
    """The rows of the table and the pictures made."""
    folder.mkdir(parents=True, exist_ok=True)
    assignments, schedule = folder / "assignment.png", folder / "schedule.png"
    panels = [(case.title, Tile(*case.tile, case.rotation).assignment()) for case in CASES]
    draw_assignments(panels, assignments)
    # As GPUs would run it: at the demonstration's size computing takes no time at all.
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=32, head_dim=128)
    case = {key: getattr(CASES[-1], key) for key in ("tile", "rotation", "chunks")}
    plan = plan_on(CLUSTER, problem, NUM_RANKS, directions=(Direction.FORWARD,), **case)
    draw_gantt([simulate(plan, CLUSTER)], schedule, num_ranks=3)
    outcomes = run_cases(report)
    rows = [Row(case, outcome) for case, outcome in zip(CASES, outcomes, strict=True)]
    return rows, [assignments, schedule]


def draw_assignments(panels: Sequence[tuple[str, Assignment]], path: Path) -> None:
    """Side by side: which rank computes each (Q partition, KV partition) cell."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.8), squeeze=False)
    for axis, (title, matrix) in zip(axes[0], panels, strict=True):
        size = len(matrix)
        axis.imshow(matrix, cmap="tab10" if size <= 10 else "tab20", interpolation="nearest")
        for i in range(size):
            for j in range(size):
                axis.text(j, i, str(matrix[i, j]), ha="center", va="center", color="white")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("KV partition")
        axis.set_ylabel("Q partition")
        axis.set_xticks(range(size))
        axis.set_yticks(range(size))
    figure.suptitle("The rank that computes each cell")
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, dpi=140)
    plt.close(figure)
