"""`mesh-attention demo`: nine real ranks on this computer, checked and counted, with pictures and a
page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import find_best
from mesh_attention.cli.command import Command, Flag
from mesh_attention.cli.demo_ranks import CASES, NUM_RANKS, Outcome, run_cases
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cost.gantt import draw_gantt
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.simulator import simulate
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import replacing
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.table import TILES
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plots import pyplot
from mesh_attention.report.facts import report_facts
from mesh_attention.report.page import plotly_js, write_page

CLUSTER = "hgx-h100"
_SCALING_RANKS = 16  # of the page: seconds, and not half a minute


def run(args: argparse.Namespace) -> int:
    pictures = _draw(args.output)
    total = NUM_RANKS * (2 + len(CASES)) + len(CASES)  # messages that the ranks will send
    done = 0
    with progress(f"{NUM_RANKS} ranks at work") as tell:

        def report(stage: str, case: int) -> None:
            nonlocal done
            done += 1
            if tell is not None:
                tell(done, total)
            elif stage == "checked":  # nobody watches a bar: a line for each case in its place
                print(f"checked: {CASES[case].title}", file=sys.stderr, flush=True)

        found = run_cases(report)
    ok = all(one.ok for one in found)
    page, line = write_report(args.output)
    show(
        args,
        lambda: {
            "ok": ok,
            "cases": [one.to_json() for one in found],
            "pictures": pictures,
            "page": page,
        },
        lambda: _for_people(found, [*(f"picture: {path}" for path in pictures), line]),
    )
    return 0 if ok else 1


def write_report(folder: Path) -> tuple[str | None, str]:
    """Where the page is, and a line that says so, or why there is none."""
    try:
        library = plotly_js()
    except MeshAttentionError as error:
        return None, f"no page: {error}"
    page = folder / "report.html"
    # Nine GPUs with as many heads as the demonstration has, and tokens that keep them busy.
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=4, head_dim=128)
    cluster = load_cluster(CLUSTER)
    with progress("searching and simulating all methods") as tell:
        found = find_best(problem, NUM_RANKS, cluster, progress=tell)
        facts = report_facts(
            found,
            cluster_found=f"{CLUSTER}, which the demonstration takes",
            most_ranks=_SCALING_RANKS,
            progress=tell,
        )
    write_page(facts, page, library)
    return str(page), f"page: {page} (open it in a browser)"


def _draw(folder: Path) -> list[str]:
    """Who computes what in each case, and the schedule of the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    assignments, schedule = folder / "assignment.png", folder / "schedule.png"
    plt = pyplot()
    figure, axes = plt.subplots(1, len(CASES), figsize=(4.4 * len(CASES), 4.8))
    for axis, case in zip(axes, CASES, strict=True):
        matrix = Tile(*case.tile, case.rotation).assignment()
        axis.imshow(matrix, cmap="tab10", interpolation="nearest")
        for i in range(NUM_RANKS):
            for j in range(NUM_RANKS):
                axis.text(j, i, str(matrix[i, j]), ha="center", va="center", color="white")
        axis.set_title(case.title, fontsize=11)
        axis.set_xlabel("KV partition")
        axis.set_ylabel("Q partition")
        axis.set_xticks(range(NUM_RANKS))
        axis.set_yticks(range(NUM_RANKS))
    figure.suptitle("The rank that computes each cell")
    figure.tight_layout()
    with replacing(assignments) as part:
        figure.savefig(part, dpi=140)
    plt.close(figure)
    # As GPUs would run it: at the demonstration's size computing takes no time at all.
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=32, head_dim=128)
    options: dict[str, Any] = {"tile": case.tile, "rotation": case.rotation, "chunks": case.chunks}
    plan = plan_on(
        *(CLUSTER, problem, NUM_RANKS), method=TILES, directions=(Direction.FORWARD,), **options
    )
    draw_gantt([simulate(plan, CLUSTER)], schedule, num_ranks=3)
    return [str(assignments), str(schedule)]


def _for_people(found: Sequence[Outcome], files: Sequence[str]) -> str:
    lines = [("assignment of work", "counted", "predicted", "error", "of gradients", "")]
    for one in found:
        errors = (f"{one.output_error:.1e}", f"{one.gradient_error:.1e}")
        units = (f"{one.counted_units:g} units", f"{one.case.paper_units} units")
        lines.append((one.case.title, *units, *errors, "ok" if one.ok else "WRONG"))
    return "\n".join(
        [
            f"\n{NUM_RANKS} gloo ranks, forward and backward, checked against float64 attention\n",
            table(lines),
            "\nOne unit is one Q partition; counted at the transport, forward, all ranks together.",
            *files,
        ]
    )


COMMAND = Command(
    "demo",
    "Nine real ranks on this computer: three assignments of work, checked and counted.",
    run,
    flags=(Flag("--output", "folder of pictures", Path, "FOLDER", Path("demo-output")),),
    examples=("mesh-attention demo --output demo-output",),
)
