"""Tables over several methods: `volume --compare` and `volume --table paper`."""

from __future__ import annotations

import argparse

from mesh_attention.cli.build import problem_of, ranks_of, settings_of, with_flags
from mesh_attention.cli.command import UsageError
from mesh_attention.cli.options import given
from mesh_attention.cli.output import print_json, table
from mesh_attention.cli.progress import progress
from mesh_attention.plan.compare import Compared, compare
from mesh_attention.plan.draw import bytes_text
from mesh_attention.plan.paper import paper_table
from mesh_attention.plan.plan import Direction

__all__ = ["show_comparison", "show_paper_table"]

# Settings that leave every method its own choice of the rest.
_SHARED = ("layout", "stripe_block", "gather_out", "combine")


def show_comparison(args: argparse.Namespace) -> int:
    options = settings_of(args)
    ranks_per_node = options.pop("ranks_per_node", None)
    chosen = [name for name in options if name not in _SHARED]
    if args.method or chosen:
        name = "method" if args.method else chosen[0].replace("_", "-")
        raise UsageError(f"--compare tries all methods and settings itself; leave --{name} out")
    try:
        with progress("planning") as tell:
            rows = compare(problem_of(args), ranks_of(args), ranks_per_node, options, progress=tell)
    except (ValueError, OverflowError) as error:
        raise UsageError(with_flags(str(error))) from error
    if args.json:
        print_json([row.to_json() for row in rows])
        return 0
    directions = (Direction.FORWARD, Direction.BACKWARD)
    head = ["method", "setting"]
    for direction in directions:
        head += [f"{direction}", "inter-node", "workspace", "collectives", "p2p"]
    lines = [head] + [_line(row, directions) for row in rows]
    print(table(lines))
    print(
        "Most bytes a rank receives, in all and (its node / ranks of it) from other nodes; most\n"
        "workspace at once; collectives and point-to-point rounds. Each method at the setting\n"
        "that brings the fewest forward bytes into a node, counted from its programs; not a time."
    )
    return 0


def _line(row: Compared, directions: tuple[Direction, ...]) -> list[str]:
    setting = " ".join(f"{name}={_short(value)}" for name, value in row.setting.items()) or "-"
    cells = [row.method, setting if row.reason is None else "cannot"]
    for direction in directions:
        one = row.counts.get(direction)
        if one is None:
            cells += ["-"] * 5
            continue
        sizes = (one.total_bytes, one.inter_node_bytes, one.peak_buffer_bytes)
        cells += [*map(bytes_text, sizes), str(one.collectives), str(one.point_to_point)]
    return cells


def _short(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def show_paper_table(args: argparse.Namespace) -> int:
    if given(args):
        raise UsageError(f"--table paper has a problem of its own; leave {given(args)[0]} out")
    with progress("counting") as tell:
        cells = paper_table(tell)
    if args.json:
        print_json([cell.to_json() for cell in cells])
        return 0
    print("256 GPUs, 8 a node, 512K tokens, 64 heads of 128, bf16: GiB per GPU, total / inter-node")
    lines = [["", "", "counted", "paper", ""]]
    for cell in cells:
        counted = f"{cell.total_gib:.1f} / {cell.inter_node_gib:.1f}"
        paper = f"{cell.cell.total} / {cell.cell.inter_node}"
        verdict = "agrees" if cell.agrees else "differs"
        lines.append([cell.cell.row, cell.cell.column, counted, paper, verdict])
    print(table(lines))
    for cell in cells:
        if not cell.agrees and cell.cell.note:
            print(f"{cell.cell.row}, {cell.cell.column}: {cell.cell.note}")
    return 0
