"""Runs the demonstration and writes its pictures; `mesh-attention demo` prints what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesh_attention.demo.pictures import draw_assignments, draw_schedule
from mesh_attention.demo.ranks import CASES, NUM_RANKS, Case, Outcome, run_cases
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.draw.tasks import task_graph
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import make_plan
from mesh_attention.plan.schedule.tasks import Costs

__all__ = ["Row", "run_demo"]

TOLERANCE = 1e-10


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
    plan = plan_at_gpu_size(CASES[-1])
    title = f"Forward schedule, {CASES[-1].title}, {NUM_RANKS} ranks, 72K tokens, 32 heads of 128"
    graph = task_graph(plan, plan.forward, Costs())
    draw_schedule(graph, plan.forward.schedule, title, schedule)
    outcomes = run_cases(report)
    rows = [Row(case, outcome) for case, outcome in zip(CASES, outcomes, strict=True)]
    return rows, [assignments, schedule]


def plan_at_gpu_size(case: Case) -> Plan:
    """The case as GPUs would run it: at the demonstration's size computing takes no time at all."""
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=32, head_dim=128)
    return make_plan(problem, NUM_RANKS, tile=case.tile, rotation=case.rotation, chunks=case.chunks)
