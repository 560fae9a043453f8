"""`mesh-attention profile`: measures this cluster under torchrun and writes its file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_attention.cli.command import Command, Flag, on_ranks
from mesh_attention.cli.output import progress, show
from mesh_attention.cli.values import one_of, size
from mesh_attention.files import check_writable, replacing
from mesh_attention.machine.cluster import Cluster

if TYPE_CHECKING:
    from mesh_attention.measure.ranks import Ranks

DTYPES = ("bfloat16", "float16", "float32", "float64")


def run(args: argparse.Namespace) -> int:
    command = "profile --output cluster.toml"
    return on_ranks(command, args.ranks_per_node, lambda ranks: _profile(args, ranks))


def _profile(args: argparse.Namespace, ranks: Ranks) -> int:
    """All ranks measure; the first one writes the file and prints what is in it."""
    # Imported here, as they import torch, which most commands do not need.
    import torch

    from mesh_attention.measure.kernel_rates import Sizes
    from mesh_attention.measure.profile import profile_ranks

    ranks.of_first(lambda: check_writable(args.output))
    with progress("measuring", shown=ranks.rank == 0) as tell:
        profile = profile_ranks(
            ranks,
            name=args.name or args.output.stem or "measured",
            sizes=Sizes.usual(
                ranks.device,
                heads=args.heads,
                head_dim=args.head_dim,
                dtype=None if args.dtype is None else getattr(torch, args.dtype),
                quick=args.quick,
            ),
            progress=tell,
        )

    def write() -> None:
        with replacing(args.output) as part:
            part.write_text(profile.text, encoding="utf-8")

    ranks.of_first(write)
    if ranks.rank == 0:
        show(
            args,
            lambda: {"file": str(args.output), "cluster": asdict(profile.cluster)},
            lambda: _to_lines(profile.cluster, args.output),
        )
    return 0


def _to_lines(cluster: Cluster, file: Path) -> list[str]:
    gpu, node, network = cluster.gpu, cluster.node, cluster.network
    lines = [
        f"{cluster.description}",
        f"peak {gpu.peak_tflops:g} TFLOP/s; merges at {gpu.memory_gb_per_second:g} GB/s",
    ]
    for name, kernel in cluster.kernels.items():
        for direction, rates in (("forward", kernel.forward), ("backward", kernel.backward)):
            if rates is not None:
                kinds = [f"{kind} {rate.tflops:g}" for kind, rate in rates.rates.items()]
                lines.append(f"{name} {direction}: {', '.join(kinds)} TFLOP/s")
    lines.append(
        f"inside a node: collectives {node.collective.gb_per_second:g} GB/s, point-to-point "
        f"{node.peer.gb_per_second:g}, all-to-alls {node.all_to_all_gb_per_second:g}"
    )
    if cluster.nodes > 1:
        lines.append(
            f"between nodes: {network.nics} NICs a node, collectives "
            f"{network.collective.gb_per_second:g} GB/s a NIC, point-to-point "
            f"{network.peer.gb_per_second:g}, all-to-alls {network.many_peers.gb_per_second:g}"
        )
    lines.append(f"written to {file}; use it as --cluster {file}, or ContextParallel(cluster=...)")
    return lines


COMMAND = Command(
    summary="measure kernels and links on real ranks (under torchrun), write a cluster file",
    run=run,
    flags=(
        Flag("--output", "the file", Path, "FILE.toml", Path("cluster.toml")),
        Flag("--name", "of the cluster (default: as the file)", str, "NAME"),
        Flag(
            "--ranks-per-node",
            "ranks that share a node, one after the other (default: LOCAL_WORLD_SIZE, as torchrun "
            "sets it)",
            size,
            "N",
        ),
        Flag("--heads", "heads of kernel calls (default 32 on GPUs, 4 on CPUs)", size, "N"),
        Flag("--head-dim", "size of a head (default 128)", size, "N", 128),
        Flag(
            "--dtype",
            f"{', '.join(DTYPES)} (default bfloat16 on GPUs, float32 on CPUs)",
            one_of("dtype", DTYPES),
            "NAME",
        ),
        Flag("--quick", "fewer sizes and repeats: seconds in place of a minute, less exact"),
    ),
    examples=(
        "torchrun --nproc-per-node 8 -m mesh_attention profile --output cluster.toml",
        "mesh-attention simulate --cluster cluster.toml --ranks 8 --tokens 64k --best",
    ),
)
