"""`mesh-attention report`: one HTML page about a problem on a cluster, to look at and to send.

It searches all methods and writes the page to `--output`. With `--json` it prints the facts of the
page, and writes the page only if `--output` is given.
"""

from __future__ import annotations

import os
from pathlib import Path

from mesh_attention.cli.command import Args, Command, flags
from mesh_attention.cli.options import FLAGS_OF_ALL, asked_of_all, plan_flags
from mesh_attention.cli.output import BATCH_FLAG, batch_note, missing_kernels_note, progress, show
from mesh_attention.cli.values import UsageError
from mesh_attention.report.estimates import RANKS
from mesh_attention.report.facts import report_facts
from mesh_attention.report.page import plotly_js, write_page

OUTPUT = Path("report.html")


def run(args: Args) -> int:
    asked = asked_of_all(args, "report")
    output: Path | None = args.output or (None if args.json else OUTPUT)
    library = ""
    if output is not None:  # fail before the search, not after it
        library = plotly_js()
        _refuse_unwritable(output)
    with progress("searching") as tell:
        choice = asked.search(tell)
    with progress("simulating and drawing") as tell:
        facts = report_facts(
            choice,
            cluster_found=asked.found_by,
            most_ranks=args.scaling_ranks or min(RANKS[-1], max(64, 8 * asked.ranks)),
            command=args.command_line,
            notes=[
                *batch_note(asked.batch, choice.seconds),
                *missing_kernels_note([scored.timeline for scored in choice.chosen.values()]),
            ],
            batch=asked.batch,
            progress=tell,
        )
    if output is not None:
        write_page(facts, output, library)
    lines = [facts.reason, *facts.warnings, f"The page is in {output}."]
    return show(args, facts.to_json, lambda: lines)


def _refuse_unwritable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; --output names the page, such as {path / OUTPUT}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{path} may not be written")


_FLAGS = flags(
    f"""
    --output FILE       the page (default {OUTPUT}; with --json none, unless it is given)
    --scaling-ranks N   the most ranks of the scaling picture (default: 8 x --ranks, 64 to
                        {RANKS[-1]})
    """
)
COMMAND = Command(
    "one page to look at: the choice, who computes what and when, all methods, scaling",
    run,
    [*FLAGS_OF_ALL, *BATCH_FLAG, *_FLAGS],
    plan_flags,
    examples=(
        "mesh-attention report --ranks 32 --model llama-70b --tokens 128k",
        "mesh-attention report --ranks 8 --heads 32 --tokens 64k --causal --output page.html",
    ),
)
