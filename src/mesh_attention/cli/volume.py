"""`mesh-attention volume`: bytes each rank moves and holds, counted from the programs."""

from __future__ import annotations

import argparse
from typing import Any

from mesh_attention.cli.build import plan_of
from mesh_attention.cli.command import Command
from mesh_attention.cli.compare import show_comparison, show_paper_table
from mesh_attention.cli.options import add_json_option, add_pass_option, add_plan_options
from mesh_attention.cli.output import print_json, table
from mesh_attention.cli.values import one_of
from mesh_attention.plan.count import PassCount, count
from mesh_attention.plan.draw import bytes_text
from mesh_attention.plan.plan import Direction, Plan

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--compare", action="store_true", help="all methods at their best settings, side by side"
    )
    group.add_argument(
        "--table",
        type=one_of("table", ("paper",)),
        metavar="paper",
        help="the paper's volumes per GPU, counted from our plans",
    )
    add_pass_option(parser)
    add_plan_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.table:
        return show_paper_table(args)
    if args.compare:
        return show_comparison(args)
    plan = plan_of(args)
    counts = count(plan)
    if args.json:
        print_json({str(direction): found.to_json() for direction, found in counts.items()})
    else:
        print(_for_people(plan, counts))
    return 0


def _for_people(plan: Plan, counts: dict[Direction, PassCount]) -> str:
    numbers = [found.to_json() for found in counts.values()]

    def row(name: str, *path: str) -> list[str]:
        return [name, *(bytes_text(_at(one, path)) for one in numbers)]

    rows = [
        ["", *map(str, counts)],
        row("received by a rank, mean", "bytes_per_rank", "mean"),
        row("received by a rank, max", "bytes_per_rank", "max"),
    ]
    kinds = sorted({kind for one in numbers for kind in one["bytes_per_rank_by_operation"]})
    rows += [row(f"  by {kind}", "bytes_per_rank_by_operation", kind, "mean") for kind in kinds]
    rows += [
        row("  of it LSE and delta", "statistics_bytes_per_rank", "mean"),
        row("from other nodes, mean", "inter_node_bytes_per_rank", "mean"),
        row("from other nodes, max", "inter_node_bytes_per_rank", "max"),
        row("most workspace at once", "peak_buffer_bytes"),
        ["units over all ranks", *(f"{one['units_total']:.10g}" for one in numbers)],
    ]
    unit = next(iter(counts.values())).unit_bytes
    settings = {f"tile {one.setting['tile']}" for one in plan.passes if "tile" in one.setting}
    head = ", ".join([f"{plan.method} on {plan.num_ranks} ranks", *sorted(settings)])
    return f"{head}\n{table(rows)}\n1 unit is one Q partition, {bytes_text(unit)}"


def _at(numbers: dict[str, Any], path: tuple[str, ...]) -> float:
    found: Any = numbers
    for key in path:
        found = found.get(key, {})
    return float(found or 0)


COMMAND = Command(
    name="volume",
    summary="count the bytes each rank receives, inside and between nodes, and holds at most",
    configure=configure,
    run=run,
    examples=(
        "mesh-attention volume --ranks 9",
        "mesh-attention volume --ranks 256 --tile 16x16 --tokens 524288 --heads 64 "
        "--ranks-per-node 8 --alpha 4 --json",
        "mesh-attention volume --compare --ranks 64 --heads 64 --kv-heads 8 --ranks-per-node 8",
        "mesh-attention volume --table paper",
    ),
)
