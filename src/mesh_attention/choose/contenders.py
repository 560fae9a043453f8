"""Settings of all methods that are worth a measurement, with the time that is predicted of each.

`auto.py` leaves out whatever cannot be the best by the model. Who measures does so because the
model is not exact, so here nothing is left out that comes near: each method's best few settings and
its best that is not cut, in each pass; with tokens where they are by default, as objects have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mesh_attention.choose.best import Candidate, candidate, finalists
from mesh_attention.choose.explored import Explored, Place, layouts_of
from mesh_attention.choose.search import Progress, Search, a_search
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.first_answer import methods_with
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem

# Operations of all ranks in simulations, about; what comes after is predicted by one rank.
MAX_OPERATIONS = 300_000


@dataclass(frozen=True)
class Contender:
    """A setting of a method in one pass. Passes of one plan have one place."""

    direction: Direction
    name: str  # of the method
    options: dict[str, Any]
    seconds: float  # predicted
    place: Place

    @cached_property
    def key(self) -> str:
        """For files: the same whenever the same is asked."""
        options = sorted((name, str(value)) for name, value in self.options.items())
        return f"{self.direction.value} {self.name} {options}"

    @property
    def text(self) -> str:
        return " ".join(
            [self.name, *(f"{name}={_word(value)}" for name, value in self.options.items())]
        )


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def contenders(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
) -> dict[Direction, list[Contender]]:
    """By pass, the best predicted first; none that needs more memory than there is, unless all do.
    Settings that make the same programs in other words are one."""
    names = methods_with(options or {})
    found: dict[Direction, list[Contender]] = {}
    done, total = 0, len(names) * len(Direction)
    for direction in Direction:
        search = a_search(problem, num_ranks, cluster, direction, options)
        every: list[Candidate] = []
        refusals = []
        for name in names:
            try:
                every += _of_method(search, name)
            except PlanError as error:
                refusals.append(f"{name}: {error}")
            done += 1
            if progress:
                progress(done, total)
        if not every:
            raise PlanError(f"no method fits; {refusals[0]}")
        fitting = [one for one in every if not one.expected[0]]
        found[direction] = _predicted(search, _different(search, fitting or every))
    return found


def _of_method(search: Search, method: str) -> list[Candidate]:
    layouts = layouts_of(search)
    if not search.given.get("relayout"):
        layouts = layouts[:1]  # as tokens are by default
    every = []
    for layout in layouts:
        explored = Explored(search, method, layout=layout)
        explored.try_all()
        found = finalists(search, explored, in_place=True)
        every += [candidate(search, method, one) for _, _, one in found]
    return every


def _different(search: Search, every: list[Candidate]) -> list[Candidate]:
    """Of those that make the same programs the one in the fewest words."""
    found: list[Candidate] = []
    for one in sorted(every, key=lambda one: (one.expected, len(one.options))):
        alike = [other for other in found if other.looks_like(one)]
        programs = [
            search.plan(x.name, x.options).direction(search.direction).programs[0]
            for x in (*alike, one)
            if alike
        ]
        if not any(program == programs[-1] for program in programs[:-1]):
            found.append(one)
    return found


def _predicted(search: Search, every: list[Candidate]) -> list[Contender]:
    found, operations = [], 0
    for one in every:
        operations += one.num_operations
        seconds = one.expected[1]
        if operations <= MAX_OPERATIONS:
            seconds = search.simulate(one.name, one.options).runtime_seconds
        found.append(Contender(search.direction, one.name, one.options, seconds, one.place))
    return sorted(found, key=lambda one: one.seconds)
