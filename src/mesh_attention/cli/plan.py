"""Commands about one plan: `plan` makes and shows it, `draw` draws it, `verify` proves it.

`plan --text` writes the full text form, which `verify --text` reads. `plan --target` compiles the
plan for a machine, named by a cluster, its GPU or a file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh_attention.cli.command import Args, Command, flags_beside
from mesh_attention.cli.options import directions_of, plan_flags, plan_of
from mesh_attention.cli.output import progress, show
from mesh_attention.cli.values import UsageError
from mesh_attention.cost.planning import target_on
from mesh_attention.errors import PlanTextError
from mesh_attention.files import read_text, replacing
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.text import (
    HEADER,
    digest,
    parse_plan,
    plan_lines,
    program_lines,
)
from mesh_attention.plan.passes.compile import compile_plan
from mesh_attention.plan.read.count import count
from mesh_attention.plan.read.draw import computed_cells, draw_assignment, draw_steps, draw_summary
from mesh_attention.plan.read.verify import Finding, verify

MOST_BYTES = 1 << 30  # the text of a mesh of 1,024 ranks has 40 MB


def run_plan(args: Args) -> int:
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
    return show(args, lambda: _plan_json(plan), lambda: _plan_text(plan, args.rank or 0))


def cluster_of_target(name: str) -> Cluster:
    """`h200` is the cluster of H200 GPUs that ships with the library."""
    known = cluster_names()
    matches = [cluster for cluster in known if name.lower() in cluster.split("-")]
    if not matches and not Path(name).is_file() and name not in known:
        gpus = [cluster.split("-")[1] for cluster in known if cluster.startswith("hgx-")]
        names = ", ".join([*gpus, *known])
        raise UsageError(f"--target {name}: it is neither a file nor one of {names}")
    return load_cluster(matches[0] if len(matches) == 1 else name)


def _plan_text(plan: Plan, rank: int) -> list[str]:
    """A summary and the steps; of a plan that is compiled for a target, a program of `rank` too."""
    lines = [draw_summary(plan)]
    for pass_ in plan.passes:
        lines += [f"\n{pass_.direction} steps", draw_steps(pass_.schedule)]
    if plan.target is not None:
        for pass_ in plan.passes:
            lines.append(f"\n{pass_.direction}, rank {rank}, compiled for {plan.target.name}")
            lines += program_lines(pass_.programs[rank])
    return lines


def _plan_json(plan: Plan) -> dict[str, Any]:
    counts = count(plan)
    passes = {}
    for pass_ in plan.passes:
        work = balance(plan, pass_)
        passes[str(pass_.direction)] = {
            "setting": pass_.setting,
            "groups": pass_.groups,
            "steps": _steps_json(pass_.schedule),
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


def _steps_json(schedule: Schedule) -> list[dict[str, Any]]:
    return [
        {
            "communication": None if step.communication is None else str(step.communication),
            "compute": list(map(str, step.compute)),
        }
        for step in schedule.steps
    ]


def run_draw(args: Args) -> int:
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
                "steps": _steps_json(pass_.schedule),
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


def run_verify(args: Args) -> int:
    plan = plan_of(args) if args.text is None else _read(args)
    with progress("verifying") as tell:
        findings = verify(plan, progress=tell)
    return show(
        args,
        lambda: {
            "ok": not findings,
            "digest": digest(plan),
            "problems": [finding.to_json() for finding in findings],
        },
        lambda: _verify_text(plan, findings),
        ok=not findings,
    )


def _verify_text(plan: Plan, findings: Sequence[Finding]) -> list[str]:
    if findings:
        return [*map(str, findings), f"bad: {len(findings)} problems found"]
    operations = sum(len(p.operations) for pass_ in plan.passes for p in pass_.programs)
    passes = " and ".join(str(pass_.direction) for pass_ in plan.passes)
    return [
        f"ok: {plan.method} on {plan.num_ranks} ranks, {passes}: every visible pair is "
        f"computed once and reduced to its owner once, and no rank deadlocks "
        f"({operations} operations, digest {digest(plan)[:12]})"
    ]


def _read(args: Args) -> Plan:
    """The plan of `--text`, with the passes of `--pass`."""
    if others := flags_beside(args, "--text", "--pass"):
        raise UsageError(f"--text gives the whole plan; leave out {', '.join(others)}")
    if args.text == "-":
        if sys.stdin is None:
            raise UsageError("--text -: standard input is closed")
        text = sys.stdin.read(len(HEADER))  # an input that is no plan may have no end
        text += sys.stdin.read(MOST_BYTES) if text == HEADER else ""
    else:
        text = read_text(args.text, most_bytes=MOST_BYTES)
    try:
        plan = parse_plan(text)
    except PlanTextError as error:
        raise UsageError(f"{args.text} is not the text form of a plan: {error}") from error
    directions = directions_of(args)
    passes = tuple(pass_ for pass_ in plan.passes if pass_.direction in directions)
    if not passes:
        raise UsageError(f"{args.text} holds no {args.passes or ''} pass to verify")
    return dataclasses.replace(plan, passes=passes)


PLAN = Command(
    run_plan,
    """\
make a plan: what it chose, what it costs, and the steps of its schedule

examples:
  mesh-attention plan --ranks 9 --chunks 3x3
  mesh-attention plan --ranks 8 --tokens 64k --heads 32 --causal --target h200
  mesh-attention plan --method mesh --ranks 64 --causal --chunks 4x4
  mesh-attention plan --tile 3x3 --text plan.txt

--target NAME  compile the plan for a machine: kernels of each call, places of buffers (h200, a
               cluster's name or its file)
--rank R       whose program --target shows (default 0)
--text FILE    write the full text form to FILE, or alone to - (stdout)
""",
    plan_flags,
    {"text": str},
)
DRAW = Command(
    run_draw,
    """\
draw who computes what (the assignment matrix) and in which steps

examples:
  mesh-attention draw --method mesh --ranks 9 --chunks 3x3 --pass forward
  mesh-attention draw --method mesh --ranks 9 --no-rotation --causal --layout contiguous

--first N      draw the first N partitions (default: all up to 64 ranks, else 32; in JSON all)
--whole-tasks  also number cells that the mask empties but a rank's tasks span
""",
    plan_flags,
)
VERIFY = Command(
    run_verify,
    """\
prove a plan by running all ranks on symbols; exit code 1 when it is wrong

examples:
  mesh-attention verify --ranks 64 --causal --chunks 4x4
  mesh-attention plan --text - | mesh-attention verify --text -

--text FILE  verify the plan in FILE (- is stdin) instead of making one
""",
    plan_flags,
    {"text": str},
)
