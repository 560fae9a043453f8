"""`mesh-attention demo`: nine gloo ranks on this computer run one attention in three assignments of
work.

Each case is checked against float64 attention of the whole sequence, and its bytes are counted at
the transport. This process runs the ranks in a pool of processes, draws pictures and writes a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_attention.choose.auto import find_best
from mesh_attention.cli.command import Args, Command
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.selftest import local_ranks
from mesh_attention.cost.pictures import draw_gantt, pyplot
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.simulator import simulate
from mesh_attention.errors import MeshAttentionError
from mesh_attention.files import replacing
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.table import TILES
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.report.facts import report_facts
from mesh_attention.report.page import plotly_js, write_page

if TYPE_CHECKING:
    from mesh_attention.measure.exactness import MethodRun

NUM_RANKS = 9
TOLERANCE = 1e-10  # of errors against float64 attention
CLUSTER = "hgx-h100"  # of the simulated schedule and of the page
_SIZES = {"tokens": 1152, "heads": 4, "kv_heads": 4, "head_dim": 32}
_MOST_SCALING_RANKS = 16  # on the page, which takes seconds; with more ranks, half a minute


class Case(NamedTuple):
    title: str
    tile: tuple[int, int]
    rotation: bool
    chunks: tuple[int, int]
    paper_units: int  # Q partitions that travel, by algorithm.md, section 3

    @property
    def options(self) -> dict[str, Any]:
        return {"tile": self.tile, "rotation": self.rotation, "chunks": self.chunks}


CASES = (
    Case("rows, as Ring-Attention assigns them", (1, 9), True, (1, 3), 144),
    Case("tiles 3x3 without KV rotation", (3, 3), False, (3, 3), 84),
    Case("tiles 3x3 with KV rotation", (3, 3), True, (3, 3), 72),
)


def run(args: Args) -> int:
    with local_ranks(NUM_RANKS, len(CASES)) as check:
        pictures = _draw(args.output)
        checked = {case: check(case.title, Mask(), case.options, **_SIZES) for case in CASES}
    ok = all(_is_right(*each) for each in checked.items())
    page, line = write_report(args.output)
    return show(
        args,
        lambda: {
            "ok": ok,
            "cases": [
                {"paper_units": case.paper_units, "ok": _is_right(case, x), "case": case.title}
                | {"counted_units": x.counted_units, "planned_units": x.planned_units}
                | x.errors.to_json()
                for case, x in checked.items()
            ],
            "pictures": pictures,
            "page": page,
        },
        lambda: [*_to_lines(checked), *(f"picture: {path}" for path in pictures), line],
        ok=ok,
    )


def _is_right(case: Case, checked: MethodRun) -> bool:
    counted, planned, errors = checked
    return errors.are_within(TOLERANCE) and counted == planned == case.paper_units


def _to_lines(checked: Mapping[Case, MethodRun]) -> list[str]:
    rows = [("assignment of work", "counted", "predicted", "error", "of gradients", "")]
    for case, x in checked.items():
        units = (f"{x.counted_units:g} units", f"{case.paper_units} units")
        rows.append((case.title, *units, *x.errors.texts, "ok" if _is_right(case, x) else "WRONG"))
    return [
        f"\n{NUM_RANKS} gloo ranks, forward and backward, checked against float64 attention\n",
        table(rows),
        "\nOne unit is one Q partition; counted at the transport, forward, all ranks together.",
    ]


def write_report(folder: Path) -> tuple[str | None, str]:
    """Writes the page; returns its path and a line that says so, or None and the reason."""
    try:
        library = plotly_js()
    except MeshAttentionError as error:
        return None, f"no page: {error}"
    page = folder / "report.html"
    # Nine GPUs with as many heads as the demonstration has, and tokens that keep them busy.
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=4, head_dim=128)
    with progress("searching and simulating all methods") as tell:
        facts = report_facts(
            find_best(problem, NUM_RANKS, load_cluster(CLUSTER), progress=tell),
            cluster_found=f"{CLUSTER}, which the demonstration takes",
            most_ranks=_MOST_SCALING_RANKS,
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
        axis.set(xlabel="KV partition", ylabel="Q partition")
        axis.set(xticks=range(NUM_RANKS), yticks=range(NUM_RANKS))
    figure.suptitle("The rank that computes each cell")
    figure.tight_layout()
    with replacing(assignments) as part:
        figure.savefig(part, dpi=140)
    plt.close(figure)
    # A larger problem than that of the ranks here, at whose size GPUs compute in no time.
    problem = Problem(q_tokens=NUM_RANKS * 8192, num_heads=32, head_dim=128)
    fixed: dict[str, Any] = {"method": TILES, "directions": (Direction.FORWARD,)}
    plan = plan_on(CLUSTER, problem, NUM_RANKS, **fixed, **CASES[-1].options)
    draw_gantt([simulate(plan, CLUSTER)], schedule, num_ranks=3)
    return [str(assignments), str(schedule)]


COMMAND = Command(
    run,
    """\
nine real ranks on this computer: three assignments of work, checked and counted

examples:
  mesh-attention demo --output demo-output

--output FOLDER=demo-output  folder of pictures
""",
)
