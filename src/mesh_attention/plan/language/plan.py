"""The plan: programs of all ranks for the forward and the backward pass, as frozen data.

A program is made when it is asked for, and kept: a rank that runs asks for its own, and readers
that need all of them (verify, count, simulate) ask for all.

Ranks in a plan are *logical*. `devices[g]` is the physical rank (the place in the process group)
that plays logical rank g. Layouts have the same order, so that a mapping to nodes moves no token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar, overload

from mesh_attention.errors import PlanError
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.program import Program
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem

T = TypeVar("T")


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class OnDemand(Sequence[T]):
    """A sequence whose items are made by `make(index)` when first asked for, and kept."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: list[T | None] = [None] * size

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(len(self))[index])
        made = self._made[index]
        if made is None:
            made = self._made[index] = self._make(range(len(self))[index])
        return made


class Programs(OnDemand[Program]):
    """The programs of all ranks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[tuple[Program, ...]], tuple[tuple[Program, ...]]]:
        """Pickled as what it makes: builders stay where they are."""
        return tuple, (tuple(self),)


class _Members(dict[str, dict[int, int]]):
    """The place of each rank in a group, made when asked for: a rank is in few groups."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._groups = groups

    def __missing__(self, group: str) -> dict[int, int]:
        members = self[group] = {rank: member for member, rank in enumerate(self._groups[group])}
        return members


@dataclass(frozen=True)
class Pass:
    """One direction: groups of logical ranks by name, a program for each logical rank.

    order     of the tasks, some of which may be empty on every rank
    setting   what the method chose, in words for people; no reader needs it
    copies    so many consecutive ranks do the same with other heads of the same rows, as far as the
              builder knows
    shared    plans that differ in their masks have this same object
    """

    direction: Direction
    groups: dict[str, tuple[int, ...]]
    programs: Sequence[Program]
    order: Schedule = field(compare=False)
    setting: dict[str, str] = field(default_factory=dict)
    copies: int = field(default=1, compare=False)
    shared: bool = field(default=False, compare=False)

    @cached_property
    def members(self) -> dict[str, dict[int, int]]:
        """The place of each rank in its group, by group and rank."""
        return _Members(self.groups)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of the tasks that some rank has something to do for."""
        used = {op.task.whole for program in self.programs for op in program.operations}
        steps = []
        for step in self.order.steps:
            compute = tuple(task for task in step.compute if task in used)
            communication = step.communication if step.communication in used else None
            if communication or compute:
                steps.append(Step(communication, compute))
        return Schedule(tuple(steps))


@dataclass(frozen=True, slots=True)
class Plan:
    """For every rank and pass a program: what it computes, sends and holds. `make_plan` makes one,
    `verify` proves it, `count` counts its bytes, `ContextParallel(plan=...)` runs it."""

    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    passes: tuple[Pass, ...]
    devices: tuple[int, ...]
    ranks_per_node: int | None = None
    method: str = ""
    relayout: bool = False  # callers have contiguous shards, whatever the layouts
    target: Target | None = None  # the machine that its programs are compiled for

    @property
    def shards(self) -> tuple[Layout, Layout]:
        """How the caller's queries and keys lie on the devices."""
        layouts = self.q_layout, self.kv_layout
        if self.relayout:
            kind, n = LayoutKind.CONTIGUOUS, self.num_ranks
            q, kv = (Layout(kind, layout.num_tokens, n) for layout in layouts)
        else:
            q, kv = (layout.by_device(self.devices) for layout in layouts)
        return q, kv

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    def direction(self, direction: Direction | str) -> Pass:
        for pass_ in self.passes:
            if pass_.direction == direction:
                return pass_
        known = ", ".join(pass_.direction for pass_ in self.passes)
        raise PlanError(
            f"this plan has no {direction} pass; it has: {known}; make_plan(...) without "
            "directions makes both"
        )

    @property
    def forward(self) -> Pass:
        return self.direction(Direction.FORWARD)

    @property
    def backward(self) -> Pass:
        return self.direction(Direction.BACKWARD)

    def program(self, rank: int, direction: Direction | str) -> Program:
        """What one logical rank does in one pass."""
        return self.direction(direction).programs[rank]

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
    """The value, if it is a plan; readers check their argument with it."""
    if not isinstance(value, Plan):
        raise PlanError(f"{type(value).__name__} is not a Plan; make one with make_plan(...)")
    return value
