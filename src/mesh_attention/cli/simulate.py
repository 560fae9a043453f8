"""`mesh-attention simulate`: the modelled timeline of a plan on a described cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import find_best
from mesh_attention.cli.command import Command, Flag, UsageError
from mesh_attention.cli.installed import missing_kernels, missing_kernels_note
from mesh_attention.cli.options import (
    add_plan_flags,
    directions_of,
    options_of,
    problem_of,
    ranks_of,
    tell_fewer_chunks,
)
from mesh_attention.cli.output import progress, show, table
from mesh_attention.cli.values import one_of, size
from mesh_attention.cost.gantt import check_gantt, draw_gantt
from mesh_attention.cost.planning import setting_of
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.cost.trace import trace_of
from mesh_attention.cost.waits import Overlap
from mesh_attention.files import replacing
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import AUTO
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import problem_text

DEFAULT_CLUSTER = "hgx-h100"
TRACE_RANKS, GANTT_RANKS = 16, 4


CLUSTER_FLAGS = (
    Flag(
        "--cluster",
        f"{', '.join(cluster_names())}, or a TOML file (default {DEFAULT_CLUSTER})",
        *(str, "NAME|FILE", DEFAULT_CLUSTER),
    ),
    Flag(
        "--kernel",
        "one of the cluster's kernels, for all attentions that it can do; otherwise each is done "
        "by the fastest for it",
        *(str, "NAME"),
    ),
    Flag(
        "--best",
        "search the options that are not given, and the method if none is, for the shortest time",
    ),
)


def run(args: argparse.Namespace) -> int:
    if args.clusters:
        return _show_clusters(args)
    for ranks, file in (("trace_ranks", "trace"), ("gantt_ranks", "gantt")):
        if getattr(args, ranks) is not None and getattr(args, file) is None:
            raise UsageError(f"--{file}-ranks does nothing without --{file} FILE")
    trace_ranks = args.trace_ranks or TRACE_RANKS
    gantt_ranks = args.gantt_ranks or GANTT_RANKS
    cluster = load_cluster(args.cluster)
    if args.gantt:
        check_gantt(args.gantt, gantt_ranks)
    found = simulated(args, cluster, args.overlap)
    timelines = [one.timeline for one in found]
    files = []
    if args.trace:
        with replacing(args.trace) as part, part.open("w", encoding="utf-8") as trace:
            json.dump(trace_of(timelines, trace_ranks), trace)
        shown = f"ranks 0 to {min(trace_ranks, timelines[0].plan.num_ranks) - 1}"
        files.append(f"trace: {args.trace} ({shown}; open it at https://ui.perfetto.dev)")
    if args.gantt:
        draw_gantt(timelines, args.gantt, gantt_ranks)
        files.append(f"picture: {args.gantt}")
    by_pass = {one.direction.value: one.to_json() for one in found}
    return show(
        args,
        lambda: by_pass if len(by_pass) > 1 else found[0].to_json(),
        lambda: "\n".join([for_people(found), *files]),
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A timeline, the options its plan was made with, and how many were tried to find them."""

    timeline: Timeline
    options: dict[str, Any]
    tried: int | None = None

    @property
    def direction(self) -> Direction:
        return self.timeline.pass_.direction

    @property
    def setting(self) -> dict[str, Any]:
        return setting_of(self.timeline.plan, self.timeline.pass_, self.options)

    def to_json(self) -> dict[str, Any]:
        tried = {} if self.tried is None else {"settings_tried": self.tried}
        missing = {"kernels_not_installed": missing_kernels([self.timeline])}
        return self.timeline.to_json() | {"setting": self.setting} | missing | tried


def simulated(
    args: argparse.Namespace, cluster: Cluster, overlap: Overlap | str = Overlap.EVENTS
) -> list[Simulated]:
    """Each pass that was asked for: as given, as by default where no method is, or the best."""
    problem, ranks, options = problem_of(args), ranks_of(args), options_of(args)
    directions, method = directions_of(args), args.method or AUTO
    if not args.best:
        how: dict[str, Any] = {"method": method, "cluster": cluster, "directions": directions}
        plan = make_plan(problem, ranks, **how, **options)
        tell_fewer_chunks(args, plan)
        timelines = [
            simulate(plan, cluster, one, overlap=overlap, kernel=args.kernel) for one in directions
        ]
        return [Simulated(timeline, options) for timeline in timelines]
    with progress("searching") as tell:
        best = find_best(
            *(problem, ranks, cluster),
            directions=directions,
            options=options,
            method=None if method == AUTO else method,
            overlap=overlap,
            kernel=args.kernel,
            progress=tell,
        )
    found = []
    for direction, one in best.chosen.items():
        timeline = one.timeline
        if timeline is None:  # too long for a search
            plan = best.asked.plan(direction, one.name, one.options)
            timeline = simulate(plan, cluster, direction, overlap=overlap, kernel=args.kernel)
        found.append(Simulated(timeline, one.options, best.tried))
    return found


def _show_clusters(args: argparse.Namespace) -> int:
    clusters = [load_cluster(name) for name in cluster_names()]
    width = max(len(one.name) for one in clusters)
    lines = [
        f"{one.name:<{width}}  {one.nodes} x {one.node.ranks} GPUs: {one.description}"
        for one in clusters
    ]
    to_json = {one.name: one.description for one in clusters}
    return show(args, lambda: to_json, lambda: "\n".join(lines))


def for_people(found: Sequence[Simulated]) -> str:
    first = found[0].timeline
    plan, cluster = first.plan, first.cluster
    nodes = -(-plan.num_ranks // cluster.node.ranks)
    methods = list(dict.fromkeys(f"{one.timeline.plan.method}" for one in found))
    head = (
        f"{' and '.join(methods)} on {plan.num_ranks} ranks of {cluster.name}, {nodes} "
        f"node{'s' if nodes > 1 else ''} of {cluster.node.ranks}\n{problem_text(plan.problem)}"
    )
    numbers = [one.to_json() for one in found]
    rows = [
        ["", *(one.direction.value for one in found)],
        ["runtime", *(_seconds_text(n["runtime_seconds"]) for n in numbers)],
        ["MFU", *(f"{n['mfu_percent']:.1f} %" for n in numbers)],
        ["exposed communication", *(_part_text(n, "open_communication") for n in numbers)],
        ["waiting for other ranks", *(_part_text(n, "waiting_for_ranks") for n in numbers)],
        [
            "communication busy, mean",
            *(_seconds_text(n["communication_busy_seconds"]["mean"]) for n in numbers),
        ],
        ["received by a rank, max", *(bytes_text(n["received_bytes"]["max"]) for n in numbers)],
        ["peak memory", *(bytes_text(n["peak_bytes"]) for n in numbers)],
    ]
    lines = [head, table(rows)]
    for one in found:
        tried = "" if one.tried is None else f" (best of {one.tried} tried)"
        words = ", ".join(f"{key} {_word(value)}" for key, value in one.setting.items())
        method = f"{one.timeline.plan.method}, " if len(methods) > 1 else ""
        lines.append(f"{one.direction}: {method}{words}{tried}")
        lines.append(f"{one.direction}: {_kernels_text(one.timeline)}")
        limit = cluster.gpu.memory_gib * 2**30
        if one.timeline.peak_bytes > limit:
            lines.append(f"{one.direction}: needs more than the {bytes_text(limit)} of a GPU")
    lines.append(f"Modelled, not measured; overlap {first.overlap}; memory for batch 1.")
    lines += missing_kernels_note([one.timeline for one in found])
    return "\n".join(lines)


def _kernels_text(timeline: Timeline) -> str:
    """Kernels with the part of the attentions' time that they take."""
    parts = timeline.kernels
    if not parts:
        return "no attention"
    if len(parts) == 1:
        return f"kernel {next(iter(parts))}"
    return "kernels " + ", ".join(f"{name} {part:.0%}" for name, part in parts.items())


def _word(value: object) -> str:
    return "none" if value is None else str(value)


def _seconds_text(seconds: float) -> str:
    """
    >>> _seconds_text(0.01234), _seconds_text(12.3456)
    ('12.340 ms', '12.346 s')
    """
    return f"{seconds:.3f} s" if seconds >= 10 else f"{seconds * 1e3:.3f} ms"


def _part_text(numbers: dict[str, Any], name: str) -> str:
    seconds, runtime = numbers[f"{name}_seconds"], numbers["runtime_seconds"]
    share = seconds / runtime if runtime else 0.0
    return f"{_seconds_text(seconds)} ({share:.0%})"


COMMAND = Command(
    name="simulate",
    summary="model the timeline on a cluster: runtime, MFU, exposed communication, memory",
    run=run,
    flags=(
        *CLUSTER_FLAGS,
        Flag("--clusters", "list the clusters and stop"),
        Flag(
            "--overlap",
            "events: each operation waits for its inputs only (default); strict: both halves of "
            "a step end before the next begins; none: one operation at a time",
            *(one_of("way to overlap", Overlap), "|".join(Overlap), Overlap.EVENTS.value),
        ),
        Flag("--trace", "write a trace that Perfetto opens", Path, "FILE.json"),
        Flag("--trace-ranks", f"ranks in it (default the first {TRACE_RANKS})", size, "N"),
        Flag("--gantt", "draw a Gantt chart, .png or .svg", Path, "FILE"),
        Flag("--gantt-ranks", f"ranks in it (default the first {GANTT_RANKS})", size, "N"),
    ),
    more_flags=add_plan_flags,
    examples=(
        "mesh-attention simulate --cluster hgx-h100 --ranks 64 --tokens 262144 --causal",
        "mesh-attention simulate --cluster paper --ranks 128 --heads 64 --best --pass forward",
        "mesh-attention simulate --ranks 16 --chunks 2x2 --trace trace.json --gantt chart.png",
        "mesh-attention simulate --clusters",
    ),
)
