"""`mesh-attention plan`: makes a plan and shows it, or writes its full text form.

`--target` compiles the plan for a machine, named by a cluster, its GPU or a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.options import add_plan_flags, plan_of
from mesh_attention.cli.output import show, steps_json
from mesh_attention.cli.values import count as count_of
from mesh_attention.cost.planning import target_on
from mesh_attention.files import replacing
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.text import digest, plan_lines, program_lines
from mesh_attention.plan.passes.compile import compile_plan
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.draw import draw_steps, draw_summary


def run(args: argparse.Namespace) -> int:
    if args.text == "-" and args.json:
        raise UsageError("--text - and --json both want standard output; give --text a file")
    if args.rank is not None and args.target is None:
        raise UsageError("--rank selects the program that --target shows; give --target too")
    if args.rank is not None and (args.json or args.text == "-"):
        what = "--json" if args.json else "--text -"
        raise UsageError(f"--rank selects a program for people to read; leave it or {what} out")
    plan = plan_of(args)
    if args.target is not None:
        plan = compile_plan(plan, target_on(cluster_of_target(args.target), plan))
    if args.rank is not None and args.rank >= plan.num_ranks:
        raise UsageError(f"--rank {args.rank}: the plan has ranks 0 to {plan.num_ranks - 1}")
    if args.text == "-":
        sys.stdout.writelines(line + "\n" for line in plan_lines(plan))
        return 0
    if args.text is not None:
        with replacing(args.text) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in plan_lines(plan))
    return show(args, lambda: _to_json(plan), lambda: _to_lines(plan, args.rank or 0))


def cluster_of_target(name: str) -> Cluster:
    """`h200` is the cluster of H200 GPUs that ships with the library."""
    known = cluster_names()
    matches = [cluster for cluster in known if name.lower() in cluster.split("-")]
    if not matches and not Path(name).is_file() and name not in known:
        gpus = [cluster.split("-")[1] for cluster in known if cluster.startswith("hgx-")]
        names = ", ".join([*gpus, *known])
        raise UsageError(f"--target {name}: it is neither a file nor one of {names}")
    return load_cluster(matches[0] if len(matches) == 1 else name)


def _to_lines(plan: Plan, rank: int) -> list[str]:
    """A summary and the steps; of a plan that is compiled for a target, a program of `rank` too."""
    lines = [draw_summary(plan)]
    for pass_ in plan.passes:
        lines += [f"\n{pass_.direction} steps", draw_steps(pass_.schedule)]
    if plan.target is not None:
        for pass_ in plan.passes:
            lines.append(f"\n{pass_.direction}, rank {rank}, compiled for {plan.target.name}")
            lines += program_lines(pass_.programs[rank])
    return lines


def _to_json(plan: Plan) -> dict[str, Any]:
    counts = count(plan)
    passes = {}
    for pass_ in plan.passes:
        work = balance(plan, pass_)
        passes[str(pass_.direction)] = {
            "setting": pass_.setting,
            "groups": pass_.groups,
            "steps": steps_json(pass_.schedule),
            "volume": counts[pass_.direction].to_json(),
            "visible_pairs_per_rank": {"mean": work.mean, "max": work.max},
        }
    q, kv = plan.shards
    return {
        "method": plan.method,
        "ranks": plan.num_ranks,
        "digest": digest(plan),
        "problem": dataclasses.asdict(plan.problem),
        "layout": str(plan.q_layout.kind),
        "slots": {"q": q.slots, "kv": kv.slots},
        "ranks_per_node": plan.ranks_per_node,
        "devices": plan.devices,
        "passes": passes,
    } | ({} if plan.target is None else {"target": plan.target.to_json()})


COMMAND = Command(
    summary="make a plan: what it chose, what it costs, and the steps of its schedule",
    run=run,
    flags=(
        Flag(
            "--target",
            "compile the plan for a machine: kernels of each call, places of buffers (h200, a "
            "cluster's name or its file)",
            str,
            "NAME",
        ),
        Flag("--rank", "whose program --target shows (default 0)", count_of, "R"),
        Flag("--text", "write the full text form to FILE, or alone to - (stdout)", str, "FILE"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention plan --ranks 9 --chunks 3x3",
        "mesh-attention plan --ranks 8 --tokens 64k --heads 32 --causal --target h200",
        "mesh-attention plan --method mesh --ranks 64 --causal --chunks 4x4",
        "mesh-attention plan --tile 3x3 --text plan.txt",
    ),
)
