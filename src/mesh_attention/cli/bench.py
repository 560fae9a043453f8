"""`mesh-attention bench replay`: one rank of a plan on the GPU at hand, with a modelled network."""

from __future__ import annotations

import argparse

from mesh_attention.cli.build import directions_of, problem_of, ranks_of, settings_of, with_flags
from mesh_attention.cli.command import Command, UsageError
from mesh_attention.cli.options import add_json_option, add_pass_option, add_plan_options
from mesh_attention.cli.output import print_json
from mesh_attention.cli.progress import progress
from mesh_attention.cli.replayed import for_people
from mesh_attention.cli.values import count, one_of, rank_or, size
from mesh_attention.cluster.best import find_best
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.load import cluster_names, load_cluster
from mesh_attention.cluster.planning import plan_on, setting_of
from mesh_attention.cluster.simulate import simulate
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.plan.methods.table import DEFAULT_METHOD
from mesh_attention.plan.plan import Direction
from mesh_attention.replay.share import SLOWEST, Share, rank_of, share_of

__all__ = ["COMMAND"]

BENCHMARKS = ("replay",)
DEFAULT_CLUSTER = "hgx-h100"
DEFAULT_SMS = 16  # NCCL's rings take one for each of their 16 to 24 channels
DEFAULT_REPEATS = 5


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        type=one_of("benchmark", BENCHMARKS),
        metavar="|".join(BENCHMARKS),
        help="replay: run one rank's program on this GPU, communications replaced by stand-ins "
        "that last as long as the cluster model says",
    )
    add_json_option(parser)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        default=DEFAULT_CLUSTER,
        help=f"{', '.join(cluster_names())}, or a TOML file (default {DEFAULT_CLUSTER})",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="search the settings that are not given for the shortest predicted time",
    )
    parser.add_argument(
        "--rank",
        type=rank_or(SLOWEST),
        metavar=f"R|{SLOWEST}",
        default=SLOWEST,
        help="whose program (default: of the rank that is predicted to end last)",
    )
    parser.add_argument(
        "--sms",
        type=count,
        metavar="N",
        default=DEFAULT_SMS,
        help=f"SMs that a communication takes (default {DEFAULT_SMS}, as NCCL); 0: copy engines",
    )
    parser.add_argument(
        "--same-priority",
        action="store_true",
        help="communication on a stream of ordinary priority (default: high)",
    )
    parser.add_argument(
        "--repeats",
        type=size,
        metavar="N",
        default=DEFAULT_REPEATS,
        help=f"timed runs, of which the median counts (default {DEFAULT_REPEATS})",
    )
    add_pass_option(parser)
    add_plan_options(parser)


def run(args: argparse.Namespace) -> int:
    from mesh_attention.replay.measure import check_device, measure

    check_device(args.sms)  # before minutes of planning
    cluster = load_cluster(args.cluster)
    try:
        shares = [_share(args, cluster, direction) for direction in directions_of(args.passes)]
    except (ValueError, OverflowError) as error:
        raise UsageError(with_flags(str(error))) from error
    found = [
        measure(
            share,
            sms=args.sms,
            repeats=args.repeats,
            high_priority=not args.same_priority,
        )
        for share in shares
    ]
    if args.json:
        both = {one.share.one.direction.value: one.to_json() for one in found}
        print_json(both if len(both) > 1 else found[0].to_json())
        return 0
    print(for_people(found))
    return 0


def _share(args: argparse.Namespace, cluster: Cluster, direction: Direction) -> Share:
    timeline, options = _timeline(args, cluster, direction)
    share = share_of(timeline, rank_of(timeline, args.rank))
    share.predicted["setting"] = setting_of(timeline.plan, timeline.one, options)
    return share


def _timeline(
    args: argparse.Namespace, cluster: Cluster, direction: Direction
) -> tuple[Timeline, dict[str, object]]:
    problem, ranks, options = problem_of(args), ranks_of(args), settings_of(args)
    method = args.method or DEFAULT_METHOD
    if not args.best:
        plan = plan_on(cluster, problem, ranks, method=method, directions=(direction,), **options)
        return simulate(plan, cluster, direction), options
    with progress(f"searching {direction}") as tell:
        best = find_best(
            *(problem, ranks, cluster),
            method=method,
            direction=direction,
            options=options,
            progress=tell,
        )
    return best.timeline, best.options


COMMAND = Command(
    name="bench",
    summary="run one rank of a plan on this GPU, with the network of a cluster modelled",
    configure=configure,
    run=run,
    examples=(
        "mesh-attention bench replay --cluster paper --ranks 256 --tokens 524288 --heads 64 --best",
        "mesh-attention bench replay --cluster hgx-h100 --method usp --ulysses 8 --ranks 64 "
        "--tokens 262144 --causal --pass forward --rank 0 --sms 24 --json",
    ),
)
