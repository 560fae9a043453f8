"""`mesh-attention draw`: the assignment matrix and the step table in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from mesh_attention.cli.command import Command, Flag
from mesh_attention.cli.options import add_plan_flags, plan_of
from mesh_attention.cli.output import show, steps_json
from mesh_attention.cli.values import size
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.read.draw import computed_cells, draw_assignment, draw_steps


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    shape = {"whole_tasks": bool(args.whole_tasks), "first": args.first}
    return show(
        args,
        lambda: {str(one.direction): _to_json(plan, one, shape) for one in plan.passes},
        lambda: "\n\n".join(_picture(plan, one, shape) for one in plan.passes),
    )


def _to_json(plan: Plan, one: Pass, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "matrix": computed_cells(plan, one, **shape).to_json(),
        "steps": steps_json(one.schedule),
        "head_slices": one.setting.get("head_slices"),
    }


def _picture(plan: Plan, one: Pass, shape: dict[str, Any]) -> str:
    tile = f", tile {one.setting['tile']}" if "tile" in one.setting else ""
    return (
        f"{one.direction}, {plan.method} on {plan.num_ranks} ranks{tile}: "
        f"the rank that computes each cell\n"
        f"{draw_assignment(plan, one, **shape)}\n\n{_slices(one)}{draw_steps(one.schedule)}"
    )


def _slices(one: Pass) -> str:
    """What the numbers of tasks mean where heads are sliced."""
    sizes = one.setting.get("head_slices")
    if sizes is None:
        return ""
    chunks = f", each of {one.setting['chunks']} chunks" if "chunks" in one.setting else ""
    return f"slices of {sizes} heads{chunks}, numbered one after another\n"


COMMAND = Command(
    name="draw",
    summary="draw who computes what (the assignment matrix) and in which steps",
    run=run,
    flags=(
        Flag(
            "--first",
            "draw the first N partitions (default: all up to 64 ranks, else 32; in JSON all)",
            *(size, "N"),
        ),
        Flag("--whole-tasks", "also number cells that the mask empties but a rank's tasks span"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention draw --method mesh --ranks 9 --chunks 3x3 --pass forward",
        "mesh-attention draw --method mesh --ranks 9 --no-rotation --causal --layout contiguous",
    ),
)
