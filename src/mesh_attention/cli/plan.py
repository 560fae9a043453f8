"""`mesh-attention plan`: make a plan and show it, or write its full text form."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from contextlib import suppress
from typing import Any

from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.options import add_plan_flags, plan_of
from mesh_attention.cli.output import show, steps_json
from mesh_attention.cli.targets import TARGET_FLAG, compiled
from mesh_attention.cli.values import count as count_of
from mesh_attention.errors import PlanError
from mesh_attention.files import replacing
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.text import digest, plan_lines, program_lines
from mesh_attention.plan.read.compare_schedulers import ScheduleComparison, compare_schedulers
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.draw import draw_steps, draw_summary

Comparisons = dict[Direction, ScheduleComparison]


def run(args: argparse.Namespace) -> int:
    if args.text == "-" and args.json:
        raise UsageError("--text - and --json both want standard output; give --text a file")
    if args.rank is not None and args.target is None:
        raise UsageError("--rank is whose program --target shows; give --target too")
    plan = compiled(plan_of(args), args.target)
    if args.rank is not None and args.rank >= plan.num_ranks:
        raise UsageError(f"--rank {args.rank}: the plan has ranks 0 to {plan.num_ranks - 1}")
    if args.text is not None:
        _write_text(plan, args.text)
        if args.text == "-":
            return 0
    comparisons: Comparisons = {}
    if args.compare_schedulers or args.scheduler == "search":
        for one in plan.passes:
            with suppress(*() if args.compare_schedulers else (PlanError,)):
                comparisons[one.direction] = compare_schedulers(plan, one)
    return show(
        args,
        lambda: _to_json(plan, comparisons),
        lambda: _for_people(plan, comparisons) + _compiled_program(plan, args.rank or 0),
    )


def _compiled_program(plan: Plan, rank: int) -> str:
    """Of one rank, as it runs; nothing of a plan that is not compiled."""
    if plan.target is None:
        return ""
    lines = []
    for one in plan.passes:
        lines.append(f"\n{one.direction}, rank {rank}, compiled for {plan.target.name}")
        lines += program_lines(one.programs[rank])
    return "\n" + "\n".join(lines)


def _for_people(plan: Plan, comparisons: Comparisons) -> str:
    lines = [draw_summary(plan)]
    for one in plan.passes:
        lines += [f"\n{one.direction} steps", draw_steps(one.schedule)]
        if one.direction in comparisons:
            lines.append(comparisons[one.direction].text())
    return "\n".join(lines)


def _write_text(plan: Plan, target: str) -> None:
    lines = (line + "\n" for line in plan_lines(plan))
    if target == "-":
        sys.stdout.writelines(lines)
        return
    with replacing(target) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def _to_json(plan: Plan, comparisons: Comparisons) -> dict[str, Any]:
    counts = count(plan)
    passes = {}
    for one in plan.passes:
        work = balance(plan, one)
        passes[str(one.direction)] = {
            "setting": one.setting,
            "groups": one.groups,
            "steps": steps_json(one.schedule),
            "volume": counts[one.direction].to_json(),
            "visible_pairs_per_rank": {"mean": work.mean, "max": work.max},
        }
        if one.direction in comparisons:
            passes[str(one.direction)]["schedulers"] = comparisons[one.direction].to_json()
    return {
        "method": plan.method,
        "ranks": plan.num_ranks,
        "digest": digest(plan),
        "problem": dataclasses.asdict(plan.problem),
        "layout": str(plan.q_layout.kind),
        "slots": {side: one.slots for side, one in zip(("q", "kv"), plan.shards, strict=True)},
        "ranks_per_node": plan.ranks_per_node,
        "devices": plan.devices,
        "passes": passes,
    } | ({} if plan.target is None else {"target": plan.target.to_json()})


COMMAND = Command(
    name="plan",
    summary="make a plan: what it chose, what it costs, and the steps of its schedule",
    run=run,
    flags=(
        TARGET_FLAG,
        Flag("--rank", "whose program --target shows (default 0)", count_of, "R"),
        Flag("--text", "write the full text form to FILE, or alone to - (stdout)", str, "FILE"),
        Flag(
            "--compare-schedulers",
            "say how far greedy is from the best order found (always with --scheduler search)",
        ),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention plan --ranks 9 --chunks 3x3",
        "mesh-attention plan --ranks 8 --tokens 65536 --heads 32 --causal --target h200",
        "mesh-attention plan --method mesh --ranks 64 --causal --chunks 4x4 --scheduler search",
        "mesh-attention plan --tile 3x3 --text plan.txt",
    ),
)
