"""`mesh-attention demo`: nine real ranks on this computer, checked and counted, with pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_attention.cli.command import Command, Flag
from mesh_attention.cli.output import progress, show, table

if TYPE_CHECKING:  # it needs torch
    from mesh_attention.demo.show import Row


def run(args: argparse.Namespace) -> int:
    from mesh_attention.demo.ranks import CASES, NUM_RANKS
    from mesh_attention.demo.show import run_demo

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

        rows, pictures = run_demo(args.output, report)
    ok = all(row.ok for row in rows)
    files = [str(path) for path in pictures]
    show(
        args,
        lambda: {"ok": ok, "cases": [row.to_json() for row in rows], "pictures": files},
        lambda: _for_people(NUM_RANKS, rows, files),
    )
    return 0 if ok else 1


def _for_people(num_ranks: int, rows: Sequence[Row], pictures: Sequence[str]) -> str:
    lines = [("assignment of work", "counted", "predicted", "error", "of gradients", "")]
    for row in rows:
        o = row.outcome
        errors = (f"{o.output_error:.1e}", f"{o.gradient_error:.1e}")
        units = (f"{o.counted_units:g} units", f"{row.case.paper_units} units")
        lines.append((row.case.title, *units, *errors, "ok" if row.ok else "WRONG"))
    return "\n".join(
        [
            f"\n{num_ranks} gloo ranks, forward and backward, checked against float64 attention\n",
            table(lines),
            "\nOne unit is one Q partition; counted at the transport, forward, all ranks together.",
            *(f"picture: {path}" for path in pictures),
        ]
    )


COMMAND = Command(
    "demo",
    "Nine real ranks on this computer: three assignments of work, checked and counted.",
    run,
    flags=(Flag("--output", "folder of pictures", Path, "FOLDER", Path("demo-output")),),
    examples=("mesh-attention demo --output demo-output",),
)
