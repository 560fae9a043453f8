"""`mesh-attention draw`: the assignment matrix and the step table in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from mesh_attention.cli.command import Command, Flag
from mesh_attention.cli.options import add_plan_flags, plan_of
from mesh_attention.cli.output import show, steps_json
from mesh_attention.cli.values import size
from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.read.draw import computed_cells, draw_assignment, draw_steps


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    shown: dict[str, Any] = {"whole_tasks": args.whole_tasks, "first": args.first}

    def picture(pass_: Pass) -> str:
        tile = f", tile {pass_.setting['tile']}" if "tile" in pass_.setting else ""
        matrix = draw_assignment(plan, pass_, **shown)
        return (
            f"{pass_.direction}, {plan.method} on {plan.num_ranks} ranks{tile}: the rank that "
            f"computes each cell\n{matrix}\n\n{_slices(pass_)}{draw_steps(pass_.schedule)}"
        )

    return show(
        args,
        lambda: {
            str(pass_.direction): {
                "matrix": computed_cells(plan, pass_, **shown).to_json(),
                "steps": steps_json(pass_.schedule),
                "head_slices": pass_.setting.get("head_slices"),
            }
            for pass_ in plan.passes
        },
        lambda: ["\n\n".join(map(picture, plan.passes))],
    )


def _slices(pass_: Pass) -> str:
    """The meaning of task numbers where heads are sliced."""
    sizes = pass_.setting.get("head_slices")
    if sizes is None:
        return ""
    chunks = f", each of {pass_.setting['chunks']} chunks" if "chunks" in pass_.setting else ""
    return f"slices of {sizes} heads{chunks}, numbered one after another\n"


COMMAND = Command(
    summary="draw who computes what (the assignment matrix) and in which steps",
    run=run,
    flags=(
        Flag(
            "--first",
            "draw the first N partitions (default: all up to 64 ranks, else 32; in JSON all)",
            size,
            "N",
        ),
        Flag("--whole-tasks", "also number cells that the mask empties but a rank's tasks span"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention draw --method mesh --ranks 9 --chunks 3x3 --pass forward",
        "mesh-attention draw --method mesh --ranks 9 --no-rotation --causal --layout contiguous",
    ),
)
