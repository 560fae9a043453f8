"""`mesh-attention draw`: the assignment matrix and the step table in the terminal."""

from __future__ import annotations

import argparse

from mesh_attention.cli.command import Command
from mesh_attention.cli.options import add_json_flag, add_pass_flag, add_question_flags, plan_of
from mesh_attention.cli.output import print_json, steps_json
from mesh_attention.cli.values import size
from mesh_attention.plan.draw import computed_cells, draw_assignment, draw_steps
from mesh_attention.plan.plan import Pass


def configure(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)
    parser.add_argument(
        "--first",
        type=size,
        metavar="N",
        help="draw the first N partitions (default: all up to 64 ranks, else 32; in JSON all)",
    )
    parser.add_argument(
        "--whole-tasks",
        action="store_true",
        help="also number cells that the mask empties but a rank's tasks span",
    )
    add_pass_flag(parser)
    add_question_flags(parser)


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    shape = {"whole_tasks": args.whole_tasks, "first": args.first}
    if args.json:
        print_json(
            {
                str(one.direction): {
                    "matrix": computed_cells(plan, one, **shape).to_json(),
                    "steps": steps_json(one.schedule),
                    "head_slices": one.setting.get("head_slices"),
                }
                for one in plan.passes
            }
        )
        return 0
    pictures = []
    for one in plan.passes:
        tile = f", tile {one.setting['tile']}" if "tile" in one.setting else ""
        pictures.append(
            f"{one.direction}, {plan.method} on {plan.num_ranks} ranks{tile}: "
            f"the rank that computes each cell\n"
            f"{draw_assignment(plan, one, **shape)}\n\n{_slices(one)}{draw_steps(one.schedule)}"
        )
    print("\n\n".join(pictures))
    return 0


def _slices(one: Pass) -> str:
    """What the numbers of tasks mean where heads are sliced."""
    sizes = one.setting.get("head_slices")
    if sizes is None:
        return ""
    chunks = one.setting["chunks"]
    return f"slices of {sizes} heads, each of {chunks} chunks, numbered one after another\n"


COMMAND = Command(
    name="draw",
    summary="draw who computes what (the assignment matrix) and in which steps",
    configure=configure,
    run=run,
    examples=(
        "mesh-attention draw --ranks 9 --chunks 3x3 --pass forward",
        "mesh-attention draw --ranks 9 --no-rotation --causal --layout contiguous",
    ),
)
