"""The question to all methods that `advise`, `report` and `tune` read from a command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from mesh_attention.choose.auto import PlanChoice, find_best
from mesh_attention.choose.scored import gpu_bytes
from mesh_attention.cli.command import Flag, UsageError
from mesh_attention.cli.options import directions_of, options_of, problem_of, ranks_of
from mesh_attention.cli.output import Progress
from mesh_attention.cli.values import byte_size
from mesh_attention.cost.detect_cluster import (
    NEAREST,
    Machine,
    find_cluster,
    gpu_of_driver,
    nic_gbits,
)
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.step.model_shapes import MODELS, model_shape

_MODEL_HELP = f"a known model, causal: {', '.join(MODELS)}; or a config.json of Hugging Face"
_CLUSTERS = f"{', '.join(cluster_names())}, or a TOML file"
_CLUSTER_HELP = f"{_CLUSTERS} (default: by this machine's GPU, or {NEAREST})"
MODEL_FLAG = Flag("--model", _MODEL_HELP, str, "NAME|FILE")
FLAGS = (
    MODEL_FLAG,
    Flag("--cluster", _CLUSTER_HELP, str, "NAME|FILE"),
    Flag("--memory", "of a GPU, such as 40GB (default: the cluster's)", byte_size, "SIZE"),
    Flag("--kernel", "use this kernel of the cluster where possible", str, "NAME"),
)


@dataclass(frozen=True)
class AskedOfAll:
    """The GPUs of `cluster` have the memory for one sequence; `found_by` says how it was chosen."""

    problem: Problem
    ranks: int
    cluster: Cluster
    found_by: str
    directions: tuple[Direction, ...]
    options: dict[str, Any]
    kernel: str | None
    batch: int  # sequences that share the memory of a GPU

    def search(self, tell: Progress | None) -> PlanChoice:
        return find_best(
            self.problem,
            self.ranks,
            self.cluster,
            directions=self.directions,
            options=self.options,
            kernel=self.kernel,
            progress=tell,
        )


def asked_of_all(args: argparse.Namespace, command: str) -> AskedOfAll:
    if args.method is not None:
        raise UsageError(
            f"{command} compares all methods; leave --method out, or see simulate --best"
        )
    if args.model is not None:
        for name, value in model_shape(args.model).heads.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.causal is None and args.slices is None:
            args.causal = True
    problem, ranks, options = problem_of(args), ranks_of(args), options_of(args)
    cluster, found_by = cluster_of(args)
    batch = getattr(args, "batch", None) or 1
    share = with_memory(cluster, gpu_bytes(cluster) / batch)
    return AskedOfAll(
        problem, ranks, share, found_by, directions_of(args), options, args.kernel, batch
    )


def cluster_of(args: argparse.Namespace) -> tuple[Cluster, str]:
    """The cluster, with the memory that was asked for, and how it was chosen."""
    if args.cluster is None:
        gpu = gpu_of_driver()
        cluster, found_by = find_cluster(Machine(gpu, nic_gbits=nic_gbits() if gpu else ()))
    else:
        cluster = load_cluster(args.cluster)
        found_by = f"{cluster.name}, as given"
    memory = getattr(args, "memory", None)
    return with_memory(cluster, memory) if memory else cluster, found_by


def with_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, memory_gib=num_bytes / 2**30))
