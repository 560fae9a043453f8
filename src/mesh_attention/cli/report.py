"""`mesh-attention report`: one HTML page about a problem on a cluster, to look at and to send."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mesh_attention.cli.advise import FLAGS, AskedOfAll, asked_of_all
from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.installed import missing_kernels_note
from mesh_attention.cli.options import add_plan_flags
from mesh_attention.cli.output import Progress, progress, show
from mesh_attention.cli.values import size
from mesh_attention.report.facts import ReportFacts, report_facts
from mesh_attention.report.page import plotly_js, write_page
from mesh_attention.report.scaling import RANKS

OUTPUT = Path("report.html")
_SEARCH_PART = 0.3  # of the time, about


def run(args: argparse.Namespace) -> int:
    asked = asked_of_all(args, "report")
    output: Path | None = args.output or (None if args.json else OUTPUT)
    library = ""
    if output is not None:  # what would fail in the end fails now
        library = plotly_js()
        _check(output)
    with progress("searching, simulating and drawing") as tell:
        facts = facts_of(asked, tell, args.scaling_ranks)
    if output is not None:
        write_page(facts, output, library)
    told = [facts.reason, *facts.warnings, f"The page is in {output}."]
    return show(args, facts.to_json, lambda: "\n".join(told))


def facts_of(asked: AskedOfAll, tell: Progress | None, most_ranks: int) -> ReportFacts:
    found = asked.search(_part(tell, 0.0, _SEARCH_PART))
    return report_facts(
        found,
        cluster_found=asked.found_by,
        most_ranks=most_ranks,
        notes=missing_kernels_note([one.timeline for one in found.chosen.values()]),
        progress=_part(tell, _SEARCH_PART, 1.0),
    )


def _check(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --output names the page, such as {path / OUTPUT}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{path} may not be written")


def _part(tell: Progress | None, begin: float, end: float) -> Progress | None:
    """Progress of a part of the work, told as that of all of it."""
    if tell is None:
        return None

    def told(done: int, total: int) -> None:
        tell(int(1000 * (begin + (end - begin) * done / max(total, 1))), 1000)

    return told


COMMAND = Command(
    name="report",
    summary="one page to look at: the choice, who computes what and when, all methods, scaling",
    run=run,
    flags=(
        *FLAGS,
        Flag(
            "--output",
            f"the page (default {OUTPUT}; with --json none, unless it is given)",
            *(Path, "FILE"),
        ),
        Flag(
            "--scaling-ranks",
            f"the most ranks of strong and weak scaling (default {RANKS[-1]})",
            *(size, "N", RANKS[-1]),
        ),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention report --ranks 32 --model llama-70b --tokens 131072",
        "mesh-attention report --ranks 8 --heads 32 --tokens 65536 --causal --output page.html",
    ),
)
