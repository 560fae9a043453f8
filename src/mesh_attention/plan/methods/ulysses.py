"""Ulysses and what is built on it: USP (a ring outside) and Mesh-USP (a mesh outside).

All are strands (`strand.py`) around another method: Ulysses around a method of one unit, which
then has all tokens of its heads and nothing left to fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.frame import check_ranks, frame_of
from mesh_attention.plan.methods.key_steps import Gradients
from mesh_attention.plan.methods.mesh import MeshSetting, plan_mesh
from mesh_attention.plan.methods.ring import plan_kv_ring
from mesh_attention.plan.methods.setting import Setting
from mesh_attention.plan.methods.strand import ulysses_degrees
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem

__all__ = [
    "MeshUspSetting",
    "UlyssesSetting",
    "UspSetting",
    "plan_mesh_usp",
    "plan_ulysses",
    "plan_usp",
    "usual_degree",
]

Directions = tuple[Direction, ...]


@dataclass(frozen=True, slots=True)
class UlyssesSetting(Setting):
    """Nothing of its own: the degree is the number of ranks, which must divide the heads."""


@dataclass(frozen=True, slots=True)
class UspSetting(Setting):
    """ulysses: the degree inside; None takes the largest up to 8 (or a node) that works."""

    ulysses: int | None = None
    gradients: Gradients = Gradients.TRAVEL


@dataclass(frozen=True, slots=True)
class MeshUspSetting(MeshSetting):
    """As the mesh, on units of `ulysses` ranks; None takes the largest up to 8 that works."""

    ulysses: int | None = None


def usual_degree(problem: Problem, num_ranks: int, ranks_per_node: int | None) -> int:
    most = ranks_per_node or 8
    return max(degree for degree in ulysses_degrees(problem, num_ranks) if degree <= most)


def check_degree(problem: Problem, num_ranks: int, degree: int) -> None:
    fits = ulysses_degrees(problem, num_ranks)
    if degree not in fits:
        raise PlanError(
            f"ulysses={degree} does not share out {problem.num_heads} heads "
            f"({problem.kv_heads} KV heads) on {num_ranks} ranks; degrees that work: "
            f"{', '.join(map(str, fits))}"
        )


def plan_ulysses(
    problem: Problem, num_ranks: int, setting: UlyssesSetting, directions: Directions
) -> Plan:
    check_ranks(num_ranks, setting.ranks_per_node)
    fits = ulysses_degrees(problem)
    if num_ranks not in fits:
        raise PlanError(
            f"{num_ranks} ranks do not share out {problem.num_heads} heads ({problem.kv_heads} KV "
            f"heads); numbers of ranks that work: {', '.join(map(str, fits))}"
        )
    frame = frame_of("ulysses", setting, ulysses=num_ranks)
    return plan_kv_ring(problem, num_ranks, frame, directions)


def plan_usp(problem: Problem, num_ranks: int, setting: UspSetting, directions: Directions) -> Plan:
    check_ranks(num_ranks, setting.ranks_per_node)
    degree = setting.ulysses
    if degree is None:
        degree = usual_degree(problem, num_ranks, setting.ranks_per_node)
    check_degree(problem, num_ranks, degree)
    frame = frame_of("usp", setting, ulysses=degree)
    return plan_kv_ring(problem, num_ranks, frame, directions, gradients=setting.gradients)


def plan_mesh_usp(
    problem: Problem, num_ranks: int, setting: MeshUspSetting, directions: Directions
) -> Plan:
    check_ranks(num_ranks, setting.ranks_per_node)
    degree = setting.ulysses
    if degree is None:
        degree = usual_degree(problem, num_ranks, setting.ranks_per_node)
    check_degree(problem, num_ranks, degree)
    shared = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name != "ulysses"}
    return plan_mesh(
        problem,
        num_ranks,
        MeshSetting(**shared),
        directions=directions,
        degree=degree,
        method="mesh-usp",
    )
