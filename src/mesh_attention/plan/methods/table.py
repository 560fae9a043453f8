"""All methods by name: the one place outside a builder that names them.

The command line, the tests and the support matrix read this table; adding a method is one builder
file and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.mesh import MeshSetting, plan_mesh
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem

__all__ = ["METHODS", "Method", "make_plan"]

BOTH = (Direction.FORWARD, Direction.BACKWARD)


@dataclass(frozen=True, slots=True)
class Method:
    """`setting` is the dataclass of what a person can choose; `build` turns it into a plan."""

    name: str
    summary: str
    setting: type
    build: Callable[[Problem, int, Any, tuple[Direction, ...]], Plan]

    def options(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.setting))


def _mesh(
    problem: Problem, ranks: int, setting: MeshSetting, directions: tuple[Direction, ...]
) -> Plan:
    return plan_mesh(problem, ranks, setting, directions=directions)


METHODS: Mapping[str, Method] = {
    "mesh": Method("mesh", "2-D tiles a x b of the query-key matrix", MeshSetting, _mesh),
}


def make_plan(
    problem: Problem,
    num_ranks: int,
    *,
    method: str = "mesh",
    directions: tuple[Direction, ...] = BOTH,
    **options: Any,
) -> Plan:
    """The plan of a method; every option is used, or refused by name.

    >>> plan = make_plan(Problem(q_tokens=64, num_heads=2, head_dim=8), 4, tile=(2, 2))
    >>> plan.num_ranks, plan.forward.setting["tile"]
    (4, '2x2')
    """
    if method not in METHODS:
        raise PlanError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    chosen = METHODS[method]
    unknown = [name for name in options if name not in chosen.options()]
    if unknown:
        raise PlanError(
            f"method {method} has no option {unknown[0]!r}; its options: "
            f"{', '.join(chosen.options())}"
        )
    return chosen.build(problem, num_ranks, chosen.setting(**options), directions)
