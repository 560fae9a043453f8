"""`mesh-attention simulate`: the modelled timeline of a plan on a described cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mesh_attention.cli.build import directions_of, problem_of, ranks_of, settings_of, with_flags
from mesh_attention.cli.command import Command, UsageError
from mesh_attention.cli.options import add_json_option, add_pass_option, add_plan_options
from mesh_attention.cli.output import print_json
from mesh_attention.cli.progress import progress
from mesh_attention.cli.simulated import Simulated, for_people, list_clusters
from mesh_attention.cli.values import one_of, size
from mesh_attention.cluster.best import find_best
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.gantt import check_gantt, draw_gantt
from mesh_attention.cluster.load import cluster_names, load_cluster
from mesh_attention.cluster.order import Overlap
from mesh_attention.cluster.planning import plan_on
from mesh_attention.cluster.simulate import simulate
from mesh_attention.cluster.trace import trace_of
from mesh_attention.plan.methods.table import DEFAULT_METHOD

__all__ = ["COMMAND", "DEFAULT_CLUSTER"]

DEFAULT_CLUSTER = "hgx-h100"
TRACE_RANKS, GANTT_RANKS = 16, 4


def configure(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"{', '.join(cluster_names())}, or a TOML file (default {DEFAULT_CLUSTER})",
    )
    parser.add_argument("--clusters", action="store_true", help="list the clusters and stop")
    parser.add_argument(
        "--overlap",
        type=one_of("way to overlap", tuple(Overlap)),
        metavar="|".join(Overlap),
        default=Overlap.EVENTS.value,
        help="events: each operation waits for its inputs only (default); strict: both halves of "
        "a step end before the next begins; none: one operation at a time",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="search the settings that are not given for the shortest time, each pass for itself",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write a trace that Perfetto opens"
    )
    parser.add_argument(
        "--trace-ranks",
        type=size,
        metavar="N",
        help=f"ranks in the trace (default the first {TRACE_RANKS})",
    )
    parser.add_argument(
        "--gantt", type=Path, metavar="FILE", help="draw a Gantt chart, .png or .svg"
    )
    parser.add_argument(
        "--gantt-ranks",
        type=size,
        metavar="N",
        help=f"ranks in the chart (default the first {GANTT_RANKS})",
    )
    add_pass_option(parser)
    add_plan_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.clusters:
        return _show_clusters(args)
    for ranks, file in (("trace_ranks", "trace"), ("gantt_ranks", "gantt")):
        if getattr(args, ranks) is not None and getattr(args, file) is None:
            raise UsageError(f"--{file}-ranks does nothing without --{file} FILE")
    args.trace_ranks = args.trace_ranks or TRACE_RANKS
    args.gantt_ranks = args.gantt_ranks or GANTT_RANKS
    cluster = load_cluster(DEFAULT_CLUSTER if args.cluster is None else args.cluster)
    if args.gantt:
        check_gantt(args.gantt, args.gantt_ranks)
    try:
        found = _search(args, cluster) if args.best else _simulate(args, cluster)
    except (ValueError, OverflowError) as error:
        raise UsageError(with_flags(str(error))) from error
    timelines = [one.timeline for one in found]
    if args.trace:
        with args.trace.open("w", encoding="utf-8") as file:
            json.dump(trace_of(timelines, args.trace_ranks), file)
    if args.gantt:
        draw_gantt(timelines, args.gantt, args.gantt_ranks)
    if args.json:
        both = {one.direction.value: one.to_json() for one in found}
        print_json(both if len(both) > 1 else found[0].to_json())
        return 0
    print(for_people(found))
    if args.trace:
        shown = min(args.trace_ranks, timelines[0].plan.num_ranks)
        print(f"trace: {args.trace} (ranks 0 to {shown - 1}; open it at https://ui.perfetto.dev)")
    if args.gantt:
        print(f"picture: {args.gantt}")
    return 0


def _show_clusters(args: argparse.Namespace) -> int:
    clusters = [load_cluster(name) for name in cluster_names()]
    if args.json:
        print_json({one.name: one.description for one in clusters})
    else:
        print(list_clusters(clusters))
    return 0


def _simulate(args: argparse.Namespace, cluster: Cluster) -> list[Simulated]:
    options = settings_of(args)
    directions = directions_of(args.passes)
    plan = plan_on(
        cluster,
        problem_of(args),
        ranks_of(args),
        method=args.method or DEFAULT_METHOD,
        directions=directions,
        **options,
    )
    return [
        Simulated(simulate(plan, cluster, direction, overlap=args.overlap), options)
        for direction in directions
    ]


def _search(args: argparse.Namespace, cluster: Cluster) -> list[Simulated]:
    problem, ranks, options = problem_of(args), ranks_of(args), settings_of(args)
    found = []
    for direction in directions_of(args.passes):
        with progress(f"searching {direction}") as tell:
            best = find_best(
                problem,
                ranks,
                cluster,
                method=args.method or DEFAULT_METHOD,
                direction=direction,
                options=options,
                overlap=args.overlap,
                progress=tell,
            )
        found.append(Simulated(best.timeline, best.options, best.tried))
    return found


COMMAND = Command(
    name="simulate",
    summary="model the timeline on a cluster: runtime, MFU, exposed communication, memory",
    configure=configure,
    run=run,
    examples=(
        "mesh-attention simulate --cluster hgx-h100 --ranks 64 --tokens 262144 --causal",
        "mesh-attention simulate --cluster paper --ranks 128 --heads 64 --best --pass forward",
        "mesh-attention simulate --ranks 16 --chunks 2x2 --trace trace.json --gantt chart.png",
        "mesh-attention simulate --clusters",
    ),
)
