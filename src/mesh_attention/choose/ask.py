"""Turns what people write into a question: `make_plan`, the command line and objects come in here.

A method that is named is taken as it is. For `auto`, the default, a search under a budget
(`auto.py`) chooses the method for the cluster that is named, or for the usual one. The same words
give the same plan, whoever asks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mesh_attention.choose.auto import PlanChoice, find_default
from mesh_attention.cost.detect_cluster import Machine, find_cluster
from mesh_attention.cost.planning import ask_on
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.plan.language.plan import Direction, Plan, a_direction
from mesh_attention.plan.methods.question import BOTH, Question
from mesh_attention.plan.methods.question import ask as ask_method
from mesh_attention.plan.methods.table import AUTO, DEFAULT_METHOD
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.problem import Problem


def ask(
    problem: Problem,
    num_ranks: int,
    *,
    method: str = DEFAULT_METHOD,
    cluster: Cluster | str | Path | None = None,
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> Question:
    """The question that these words ask. Every option is used, or refused by name."""
    options["directions"] = directions
    if method == AUTO:
        return choose(problem, num_ranks, cluster=cluster, **options).question
    if cluster is None:
        return ask_method(problem, num_ranks, method=method, **options)
    return ask_on(cluster, problem, num_ranks, method=method, **options)


def make_plan(
    problem: Problem,
    num_ranks: int,
    *,
    method: str = DEFAULT_METHOD,
    cluster: Cluster | str | Path | None = None,
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> Plan:
    """The plan for a problem on so many ranks. A method that is left out is chosen, for `cluster`
    where it is given. Options are those of the method; every one is used, or refused by name.

    >>> plan = make_plan(Problem(q_tokens=64, num_heads=2, head_dim=8), 4, tile=(2, 2))
    >>> plan.num_ranks, plan.forward.setting["tile"]
    (4, '2x2')
    """
    how: dict[str, Any] = {"method": method, "cluster": cluster, "directions": directions}
    return ask(problem, num_ranks, **how, **options).plan()


def choose(
    problem: Problem,
    num_ranks: int,
    *,
    cluster: Cluster | str | Path | None = None,
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> PlanChoice:
    """What `auto` chooses, and why. It is remembered: objects of one model ask the same."""
    if not isinstance(problem, Problem):
        raise PlanError(f"problem={problem!r}: must be a Problem")
    if isinstance(directions, str):
        raise PlanError(f"directions={directions!r}: must be a tuple of passes")
    num_ranks = number("ranks", num_ranks)
    if cluster is None:
        cluster = usual_machine(num_ranks, options.get("ranks_per_node"))
    said = _Options({name: value for name, value in options.items() if value is not None})
    passes = tuple(map(a_direction, directions))
    return _find_default(problem, num_ranks, a_cluster(cluster), said, directions=passes)


class _Options(dict[str, Any]):
    """Options that can be a key of a cache. They are equal if they print alike: 1 is not True."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)


_find_default = lru_cache(maxsize=64)(find_default)


def usual_machine(num_ranks: int, ranks_per_node: Any = None) -> Cluster:
    """The cluster for callers who name none. It has as many nodes as the ranks need."""
    per_node = None if ranks_per_node is None else number("ranks_per_node", ranks_per_node)
    return enough_nodes(_nearest(per_node), num_ranks)


@cache
def _nearest(ranks_per_node: int | None) -> Cluster:
    return find_cluster(Machine(node_ranks=ranks_per_node))[0]


def enough_nodes(cluster: Cluster, num_ranks: int) -> Cluster:
    """The cluster, with more nodes where the ranks do not fit on those that it has."""
    nodes = -(-num_ranks // cluster.node.ranks)
    return cluster if nodes <= cluster.nodes else replace(cluster, nodes=nodes)
