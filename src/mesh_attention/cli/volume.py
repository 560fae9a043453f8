"""`mesh-attention volume`: bytes each rank moves and holds, counted from the programs.

Of one plan, or of all methods side by side (`--compare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_attention.choose.scored import options_text
from mesh_attention.cli.command import Args, Command
from mesh_attention.cli.options import options_of, plan_flags, plan_of, problem_of, ranks_of
from mesh_attention.cli.output import BATCH_FLAG, of_batch, progress, show, table
from mesh_attention.cli.values import UsageError
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.parts.assignment import PLACES
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.read.compare import Compared, compare
from mesh_attention.plan.read.count import count, kept_bytes


def run(args: Args) -> int:
    if args.compare:
        return _show_comparison(args)
    plan = plan_of(args)
    counts, layers = count(plan), args.layers or 1
    passes = {str(d): of_batch(counted.to_json(), args.batch) for d, counted in counts.items()}
    between = {}
    if len(plan.passes) > 1:
        kept = of_batch(kept_bytes(plan, layers).to_json(), args.batch)
        between = {"between_passes": kept}
    unit = next(iter(counts.values())).unit_bytes * args.batch
    last = [
        *(_between(kept, layers) for kept in between.values()),
        f"1 unit is one Q partition, {bytes_text(unit)}",
    ]
    return show(args, lambda: passes | between, lambda: [*_to_lines(plan, passes), *last])


def _to_lines(plan: Plan, counts: dict[str, Any]) -> list[str]:
    passes = [*counts.values()]

    def row(name: str, key: str, statistic: str) -> list[str]:
        return [name, *(bytes_text(numbers[key][statistic]) for numbers in passes)]

    by_operation = [numbers["bytes_per_rank_by_operation"] for numbers in passes]
    rows = [
        ["", *counts],
        row("received by a rank, mean", "bytes_per_rank", "mean"),
        row("received by a rank, max", "bytes_per_rank", "max"),
    ]
    for kind in sorted({kind for kinds in by_operation for kind in kinds}):
        means = [kinds.get(kind, {}).get("mean", 0) for kinds in by_operation]
        rows.append([f"  by {kind}", *map(bytes_text, means)])
    rows += [
        row("  of it LSE and delta", "statistics_bytes_per_rank", "mean"),
        row("from other nodes, mean", "inter_node_bytes_per_rank", "mean"),
        row("from other nodes, max", "inter_node_bytes_per_rank", "max"),
        ["most workspace at once", *(bytes_text(x["peak_buffer_bytes"]) for x in passes)],
        ["units over all ranks", *(f"{x['units_total']:.10g}" for x in passes)],
    ]
    tiles = {f"tile {pass_.setting['tile']}" for pass_ in plan.passes if "tile" in pass_.setting}
    return [", ".join([f"{plan.method} on {plan.num_ranks} ranks", *sorted(tiles)]), table(rows)]


def _between(kept: dict[str, float], layers: int) -> str:
    who = "a layer holds" if layers == 1 else f"{layers} layers hold"
    sizes = {name: bytes_text(number) for name, number in kept.items()}
    held = f"between the passes {who} {sizes['held_bytes']}"
    if not kept["kept_bytes"]:
        return f"{held}: the caller's tensors"
    return (
        f"{held}, {sizes['kept_bytes']} of it kept rows ({sizes['extra_bytes']} more than the "
        f"caller's tensors);\nso the backward pass receives {sizes['saved_bytes']} less"
    )


def _show_comparison(args: Args) -> int:
    if args.passes not in (None, "both"):
        raise UsageError("--compare counts both passes; leave --pass out")
    problem, ranks, options = problem_of(args), ranks_of(args), options_of(args)
    ranks_per_node = options.pop("ranks_per_node", None)
    if args.layers is not None and args.max_memory_bytes is None:
        raise UsageError("--layers counts under --max-memory-bytes; add that, or leave it out")
    tried = {"method", *PLACES} | {
        name
        for method in METHODS.values()
        for setting in method.candidates(problem, ranks, ranks_per_node or ranks)
        for name in setting
    }
    for name in sorted(tried):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"--compare tries all methods and settings; leave --{flag} out")
    with progress("planning") as tell:
        rows = compare(problem, ranks, ranks_per_node, options, progress=tell)
    return show(
        args,
        lambda: [of_batch(row.to_json(), args.batch) for row in rows],
        lambda: _compared_lines(rows, args.batch),
    )


def _compared_lines(rows: Sequence[Compared], batch: int) -> list[str]:
    head = ["method", "setting"]
    for direction in Direction:
        head += [f"{direction}", "inter-node", "workspace", "collectives", "p2p"]
    return [
        table([head, *(_cells(row, batch) for row in rows)]),
        *(f"{row.method}: {row.reason}" for row in rows if row.reason is not None),
        "Most bytes a rank receives, in all and (its node / ranks of it) from other nodes; most\n"
        "workspace at once; collectives and point-to-point rounds. Each method at the setting\n"
        "that brings the fewest forward bytes into a node, counted from its programs; not a time.",
    ]


def _cells(row: Compared, batch: int) -> list[str]:
    cells = [row.method, options_text(row.setting) or "-" if row.reason is None else "cannot"]
    for direction in Direction:
        counted = row.counts.get(direction)
        if counted is None:
            cells += ["-"] * 5
            continue
        sizes = (counted.total_bytes, counted.inter_node_bytes, counted.peak_buffer_bytes)
        cells += [bytes_text(number * batch) for number in sizes]
        cells += [str(counted.collectives), str(counted.point_to_point)]
    return cells


COMMAND = Command(
    run,
    f"""\
count the bytes each rank receives, inside and between nodes, and holds at most

examples:
  mesh-attention volume --ranks 9
  mesh-attention volume --ranks 256 --tile 16x16 --tokens 512k --heads 64 --ranks-per-node 8
    --alpha 4 --json
  mesh-attention volume --compare --ranks 64 --heads 64 --kv-heads 8 --ranks-per-node 8

--compare    all methods at their best settings, side by side
{BATCH_FLAG}
""",
    plan_flags,
)
