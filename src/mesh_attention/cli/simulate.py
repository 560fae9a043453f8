"""`mesh-attention simulate`: the modelled timeline of a plan on a described cluster.

`benchmarks/replay_rank.py` takes the same flags and replays what `simulated` returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli import output
from mesh_attention.cli.command import Args, Command, flags_beside
from mesh_attention.cli.options import CLUSTERS, asked_on, plan_flags, plan_of
from mesh_attention.cli.values import UsageError, one_of
from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.pictures import check_gantt, draw_gantt, trace_of
from mesh_attention.cost.planning import setting_of
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.files import replacing
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.problem import problem_text

DEFAULT_CLUSTER = "hgx-h100"
TRACE_RANKS, GANTT_RANKS = 16, 4


def run(args: Args) -> int:
    if args.clusters:
        if flags := flags_beside(args, "--clusters"):
            raise UsageError(f"--clusters lists all clusters; leave out {', '.join(flags)}")
        return _show_clusters(args)
    for ranks, file in (("trace_ranks", "trace"), ("gantt_ranks", "gantt")):
        if getattr(args, ranks) is not None and getattr(args, file) is None:
            raise UsageError(f"--{file}-ranks does nothing without --{file} FILE")
    trace_ranks = args.trace_ranks or TRACE_RANKS
    gantt_ranks = args.gantt_ranks or GANTT_RANKS
    cluster = load_cluster(args.cluster)
    if args.gantt:
        check_gantt(args.gantt, gantt_ranks)
    passes = simulated(args, cluster, args.overlap)
    timelines = [pass_.timeline for pass_ in passes]
    files = []
    if args.trace:
        with replacing(args.trace) as part, part.open("w", encoding="utf-8") as trace:
            json.dump(trace_of(timelines, trace_ranks), trace)
        shown = f"ranks 0 to {min(trace_ranks, timelines[0].plan.num_ranks) - 1}"
        files.append(f"trace: {args.trace} ({shown}; open it at https://ui.perfetto.dev)")
    if args.gantt:
        draw_gantt(timelines, args.gantt, gantt_ranks)
        files.append(f"picture: {args.gantt}")
    by_pass = {p.direction.value: p.to_json(args.batch) for p in passes}
    return output.show(
        args,
        lambda: by_pass if len(by_pass) > 1 else by_pass[passes[0].direction.value],
        lambda: [*to_lines(passes, args.batch), *files],
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

    def to_json(self, batch: int = 1) -> dict[str, Any]:
        """Bytes are those of a batch, seconds those of one sequence."""
        tried = {} if self.tried is None else {"settings_tried": self.tried}
        missing = {"kernels_not_installed": output.missing_kernels([self.timeline])}
        numbers: dict[str, Any] = output.of_batch(self.timeline.to_json(), batch)
        return numbers | {"batch": batch, "setting": self.setting} | missing | tried


def simulated(
    args: Args, cluster: Cluster, overlap: Overlap | str = Overlap.EVENTS
) -> list[Simulated]:
    """Each pass asked for, simulated with the options on the command line, or with `--best` with
    those that a search finds."""
    asked = asked_on(args, cluster)
    if not args.best:
        plan = plan_of(args, asked.cluster)
        return [
            Simulated(
                simulate(plan, asked.cluster, direction, overlap=overlap, kernel=asked.kernel),
                asked.options,
            )
            for direction in asked.directions
        ]
    with output.progress("searching") as tell:
        best = asked.search(tell, overlap)
    return [
        Simulated(best.asked.timeline(scored), scored.options, best.tried)
        for scored in best.chosen.values()
    ]


def _show_clusters(args: Args) -> int:
    clusters = [load_cluster(name) for name in cluster_names()]
    width = max(len(cluster.name) for cluster in clusters)
    return output.show(
        args,
        lambda: {cluster.name: cluster.description for cluster in clusters},
        lambda: (
            f"{cluster.name:<{width}}  {cluster.nodes} x {cluster.node.ranks} GPUs: "
            f"{cluster.description}"
            for cluster in clusters
        ),
    )


def to_lines(passes: Sequence[Simulated], batch: int = 1) -> list[str]:
    first = passes[0].timeline
    plan, cluster = first.plan, first.cluster
    methods = list(dict.fromkeys(f"{pass_.timeline.plan.method}" for pass_ in passes))
    numbers = [pass_.to_json(batch) for pass_ in passes]
    busy = [n["communication_busy_seconds"]["mean"] for n in numbers]
    rows = [
        ["", *(pass_.direction.value for pass_ in passes)],
        ["runtime", *(_seconds_text(n["runtime_seconds"]) for n in numbers)],
        ["MFU", *(f"{n['mfu_percent']:.1f} %" for n in numbers)],
        ["exposed communication", *(_part_text(n, "open_communication") for n in numbers)],
        ["waiting for other ranks", *(_part_text(n, "waiting_for_ranks") for n in numbers)],
        ["communication busy, mean", *map(_seconds_text, busy)],
        ["received by a rank, max", *(bytes_text(n["received_bytes"]["max"]) for n in numbers)],
        ["peak memory", *(bytes_text(n["peak_bytes"]) for n in numbers)],
    ]
    lines = [
        f"{' and '.join(methods)} on {output.ranks_text(plan.num_ranks)} of {cluster.name}, "
        f"{output.nodes_text(plan.num_ranks, cluster.node.ranks)}\n{problem_text(plan.problem)}",
        output.table(rows),
    ]
    limit = gpu_bytes(cluster) * batch
    for pass_ in passes:
        tried = "" if pass_.tried is None else f" (best of {pass_.tried} tried)"
        words = ", ".join(
            f"{key} {'none' if value is None else value}" for key, value in pass_.setting.items()
        )
        method = f"{pass_.timeline.plan.method}, " if len(methods) > 1 else ""
        lines.append(f"{pass_.direction}: {method}{words}{tried}")
        lines.append(f"{pass_.direction}: {_kernels_text(pass_.timeline.kernels)}")
        if pass_.timeline.peak_bytes * batch > limit:
            lines.append(f"{pass_.direction}: needs more than the {bytes_text(limit)} of a GPU")
    lines += output.batch_note(batch, sum(pass_.timeline.runtime_seconds for pass_ in passes))
    times = "" if batch == 1 else ", times for one sequence"
    lines.append(
        f"Modelled, not measured; overlap {first.overlap}; bytes for batch {batch}{times}."
    )
    return lines + output.missing_kernels_note([pass_.timeline for pass_ in passes])


def _kernels_text(parts: dict[str, float]) -> str:
    """Kernels, with the part of the attention time that each takes."""
    if len(parts) < 2:
        return f"kernel {next(iter(parts))}" if parts else "no attention"
    return "kernels " + ", ".join(f"{name} {part:.0%}" for name, part in parts.items())


def _seconds_text(seconds: float) -> str:
    """
    >>> _seconds_text(0.01234), _seconds_text(12.3456)
    ('12.340 ms', '12.346 s')
    """
    return f"{seconds:.3f} s" if seconds >= 10 else f"{seconds * 1e3:.3f} ms"


def _part_text(numbers: dict[str, Any], name: str) -> str:
    seconds, runtime = numbers[f"{name}_seconds"], numbers["runtime_seconds"]
    return f"{_seconds_text(seconds)} ({seconds / runtime if runtime else 0.0:.0%})"


CLUSTER_FLAGS = f"""\
--cluster NAME|FILE={DEFAULT_CLUSTER}  {CLUSTERS}, or a TOML file (default {DEFAULT_CLUSTER})
--kernel NAME     one of the cluster's kernels, for all attentions that it can do; otherwise each is
                  done by the fastest for it
--best            search the options that are not given, and the method if none is, for the shortest
                  time"""
COMMAND = Command(
    run,
    f"""\
model the timeline on a cluster: runtime, MFU, exposed communication, memory

examples:
  mesh-attention simulate --cluster hgx-h100 --ranks 64 --tokens 256k --causal
  mesh-attention simulate --cluster paper --ranks 128 --heads 64 --best --pass forward
  mesh-attention simulate --ranks 16 --chunks 2x2 --trace trace.json --gantt chart.png
  mesh-attention simulate --clusters

{CLUSTER_FLAGS}
{output.BATCH_FLAG}
--clusters        list the clusters and stop
--overlap {"|".join(Overlap)}={Overlap.EVENTS}
                  events: each operation waits for its inputs only (default); strict: both halves of
                  a step end before the next begins; none: one operation at a time
--trace FILE.json  write a trace that Perfetto opens
--trace-ranks N   ranks in it (default the first {TRACE_RANKS})
--gantt FILE      draw a Gantt chart, .png or .svg
--gantt-ranks N   ranks in it (default the first {GANTT_RANKS})
""",
    plan_flags,
    {"overlap": one_of("way to overlap", Overlap)},
)
