"""`--target`: a cluster whose machine a plan is compiled for, by its name or that of its GPU."""

from __future__ import annotations

from pathlib import Path

from mesh_attention.cli.command import Flag, UsageError
from mesh_attention.cost.planning import target_on
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import cluster_names, load_cluster
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.passes.compile import compile_plan

TARGET_FLAG = Flag(
    "--target",
    "compile the plan for a machine: kernels of each call, places of buffers (h200, a cluster's "
    "name or its file)",
    str,
    "NAME",
)


def cluster_of_target(name: str) -> Cluster:
    """`h200` is the cluster of H200 GPUs that ships with the library."""
    fits = [one for one in cluster_names() if name.lower() in one.split("-")]
    if not fits and not Path(name).is_file() and name not in cluster_names():
        gpus = ", ".join(one.split("-")[1] for one in cluster_names() if one.startswith("hgx-"))
        known = ", ".join(cluster_names())
        raise UsageError(f"--target {name}: it is neither a file nor one of {gpus}, {known}")
    return load_cluster(fits[0] if len(fits) == 1 else name)


def compiled(plan: Plan, name: str | None) -> Plan:
    return plan if name is None else compile_plan(plan, target_on(cluster_of_target(name), plan))
