"""Plans for a cluster: its node size and its rough costs are settings that no caller repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import ClusterError, a_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.methods.question import Question, ask
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem


def plan_on(
    cluster: Cluster | str | Path,
    problem: Problem,
    num_ranks: int,
    *,
    method: str,
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
    method: str,
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
    nodes: dict[str, Any] = {"ranks_per_node": cluster.node.ranks}
    found = ask(problem, num_ranks, method=method, directions=directions, **nodes, **options)
    if options.get("costs") is None and hasattr(found.setting, "costs"):
        costs: dict[str, Any] = {"costs": costs_of(cluster, num_ranks)}
        found = replace(found, setting=replace(found.setting, **costs))
    return found


PLACES = ("alpha", "units_per_node")  # options that say which rank holds which partition


def tokens_stay(plan: Plan, given: Mapping[str, Any]) -> bool:
    """Whether tokens lie where they do by default, or as the caller said: objects that share a
    batch, with other masks and so other plans, rely on it."""
    if given.get("relayout"):
        return True
    kind = LayoutKind.CONTIGUOUS if plan.problem.mask.is_full else LayoutKind.ZIGZAG
    in_order = plan.devices == tuple(range(plan.num_ranks))
    return (given.get("layout") is not None or plan.q_layout.kind is kind) and (
        in_order or any(given.get(name) is not None for name in PLACES)
    )


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
