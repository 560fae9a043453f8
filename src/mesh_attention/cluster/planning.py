"""Plans for a cluster: its node size and its rough costs are settings that no caller repeats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.load import ClusterError, a_cluster
from mesh_attention.plan.arguments import number
from mesh_attention.plan.methods.table import DEFAULT_METHOD, METHODS
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import Question, ask


def plan_on(
    cluster: Cluster | str | Path,
    problem: Problem,
    num_ranks: int,
    *,
    method: str = DEFAULT_METHOD,
    directions: tuple[Direction, ...] = tuple(Direction),
    **options: Any,
) -> Plan:
    """`make_plan` for so many ranks of this cluster."""
    return ask_on(
        *(cluster, problem, num_ranks), method=method, directions=directions, **options
    ).plan()


def ask_on(
    cluster: Cluster | str | Path,
    problem: Problem,
    num_ranks: int,
    *,
    method: str = DEFAULT_METHOD,
    directions: tuple[Direction, ...] = tuple(Direction),
    **options: Any,
) -> Question:
    """`ask` for so many ranks of this cluster."""
    cluster, num_ranks = a_cluster(cluster), number("ranks", num_ranks)
    if num_ranks > cluster.num_ranks:
        raise ClusterError(
            f"{cluster.name} has {cluster.num_ranks} ranks ({cluster.nodes} nodes of "
            f"{cluster.node.ranks}), fewer than ranks={num_ranks}"
        )
    given = options.pop("ranks_per_node", None)
    if given not in (None, cluster.node.ranks):
        raise ClusterError(
            f"ranks_per_node={given}: a node of {cluster.name} has {cluster.node.ranks} ranks; "
            "leave it out, or describe another cluster in a file"
        )
    nodes = {"ranks_per_node": cluster.node.ranks}
    if isinstance(method, str) and method in METHODS and "costs" in METHODS[method].options():
        options.setdefault("costs", cluster.planning_costs(num_ranks))
    return ask(problem, num_ranks, method=method, directions=directions, **nodes, **options)


def setting_of(plan: Plan, one: Pass, options: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen for a pass: what it says itself, and the options that it does not name."""
    setting: dict[str, Any] = {**one.setting, "layout": plan.q_layout.kind.value}
    stated = {*setting, *(f"backward_{name}" for name in setting), "ranks_per_node", "costs"}
    for name, value in options.items():
        if name not in stated and value is not None:
            pair = isinstance(value, tuple)
            setting[name] = "x".join(map(str, value)) if pair else value
    if "tile" in setting:
        setting.setdefault("alpha", None)  # row by row
    return setting
