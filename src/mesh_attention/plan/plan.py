"""The plan: programs of all ranks for the forward and the backward pass, as frozen data.

Ranks in a plan are *logical*: logical rank g owns partition g. `devices[g]` is the physical rank
(the place in the process group) that plays it, so a topology-aware mapping changes this one tuple.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule.tasks import Schedule

__all__ = ["Direction", "Pass", "Plan", "a_direction", "a_plan"]


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction: groups of logical ranks by name, a program for each logical rank.

    `setting` says in words what the method chose; it is for people, and no reader needs it.
    """

    direction: Direction
    groups: dict[str, tuple[int, ...]]
    programs: tuple[Program, ...]
    schedule: Schedule
    setting: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    passes: tuple[Pass, ...]
    devices: tuple[int, ...]
    ranks_per_node: int | None = None
    method: str = ""

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    def direction(self, direction: Direction | str) -> Pass:
        for one in self.passes:
            if one.direction == direction:
                return one
        known = ", ".join(one.direction for one in self.passes)
        raise PlanError(f"this plan has no {direction} pass; it has: {known}")

    @property
    def forward(self) -> Pass:
        return self.direction(Direction.FORWARD)

    @property
    def backward(self) -> Pass:
        return self.direction(Direction.BACKWARD)

    def node_of(self, rank: int) -> int:
        """The node of a logical rank; without a node size all ranks share one node."""
        return self.devices[rank] // self.ranks_per_node if self.ranks_per_node else 0

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node) if self.ranks_per_node else 1


def a_direction(value: Any) -> Direction:
    try:
        return Direction(value)
    except ValueError:
        raise PlanError(f"{value!r} is not a pass; known: {', '.join(Direction)}") from None


def a_plan(value: Any) -> Plan:
    """What a reader of plans was given, if it is one."""
    if not isinstance(value, Plan):
        raise PlanError(f"{type(value).__name__} is not a Plan; make one with make_plan(...)")
    return value
