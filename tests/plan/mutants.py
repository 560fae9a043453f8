"""Proven plans changed in one place, and that `verify` catches the change in the right pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from plan_cases import random_problem, random_setting

from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Operation,
    Program,
    ReduceScatter,
)
from mesh_attention.plan.methods.box_methods import box_plan
from mesh_attention.plan.read.verify import Finding, verify

__all__ = [
    "MUTANTS",
    "Collective",
    "Compute",
    "Place",
    "caught",
    "is_collective",
    "is_compute",
    "places",
    "random_places",
]

MUTANTS = 120  # of each kind
MOST_RANKS = 6  # groups of three, and of six; the work grows with the square
Collective = AllGather | ReduceScatter | AllToAll
Compute = Attend | AttendBackward


class Place:
    """One operation of one rank in one pass of a plan, and what a plan without it looks like."""

    def __init__(self, plan: Plan, pass_: Pass, rank: int, at: int) -> None:
        self.plan, self.pass_, self.rank, self.at = plan, pass_, rank, at

    @property
    def program(self) -> Program:
        return self.pass_.programs[self.rank]

    @property
    def op(self) -> Operation:
        return self.program.operations[self.at]

    def with_operations(self, operations: tuple[Operation, ...]) -> Plan:
        programs = list(self.pass_.programs)
        programs[self.rank] = replace(self.program, operations=operations)
        changed = replace(self.pass_, programs=tuple(programs))
        passes = tuple(changed if pass_ is self.pass_ else pass_ for pass_ in self.plan.passes)
        return replace(self.plan, passes=passes)

    def put(self, *new: Operation) -> Plan:
        """The plan with other operations (or none) in place of this one."""
        ops = self.program.operations
        return self.with_operations((*ops[: self.at], *new, *ops[self.at + 1 :]))


def places(plan: Plan, wanted: Callable[[Operation], bool]) -> list[Place]:
    return [
        Place(plan, pass_, program.rank, at)
        for pass_ in plan.passes
        for program in pass_.programs
        for at, op in enumerate(program.operations)
        if wanted(op)
    ]


def random_places(seed: int, wanted: Callable[[Operation], bool]) -> Iterator[tuple[Random, Place]]:
    """Places in many random plans, a few from each."""
    rng = Random(seed)
    num_places = 0
    while num_places < MUTANTS:
        ranks = rng.randint(1, MOST_RANKS)
        problem = random_problem(rng, ranks)
        setting = random_setting(rng, problem, ranks)
        if problem.q_tokens > 500 or problem.keys > 500:
            continue
        here = places(box_plan(problem, ranks, setting), wanted)
        for place in rng.sample(here, min(8, len(here))):
            yield rng, place
            num_places += 1


def caught(place: Place, mutant: Plan) -> Finding:
    """The pass that was not changed is proven already, and left out."""
    changed = [pass_ for pass_ in mutant.passes if pass_.direction is place.pass_.direction]
    findings = verify(replace(mutant, passes=tuple(changed)))
    assert findings, f"not caught: {place.pass_.direction}, rank {place.rank}, {place.op}"
    assert findings[0].direction == place.pass_.direction
    return findings[0]


def is_compute(op: Operation) -> bool:
    return isinstance(op, Attend | AttendBackward)


def is_collective(op: Operation) -> bool:
    return isinstance(op, AllGather | ReduceScatter | AllToAll)
