"""Settings of all methods that are worth a measurement, with the time that is predicted of each.

A search leaves out what cannot be the best by the model. Who measures does so because the model is
not exact, so each method is searched for itself: its best few settings and its best that is not
cut, in each pass, with tokens where they are by default, as objects have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_attention.choose.effort import SEARCH
from mesh_attention.choose.search import PassSearch, Scored, SearchQuestion
from mesh_attention.choose.shapes import default_layout
from mesh_attention.cost.collector import collector_paused
from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.load import a_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import methods_with
from mesh_attention.plan.problem.problem import Problem

_OF_METHOD = 3  # settings, beside the best that is not cut
_EFFORT = SEARCH._replace(shapes=6, simulated_operations=300_000)  # of each method


@collector_paused()
def contenders(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    options: Mapping[str, Any] | None = None,
) -> dict[Direction, list[Scored]]:
    """By pass, the best predicted first, without timelines; none that needs more memory than there
    is, unless all do. Settings that make the same programs in other words are one."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    asked = SearchQuestion(
        problem, num_ranks, a_cluster(cluster), given, methods_with(given), _EFFORT
    )
    return {direction: _of_pass(asked, direction) for direction in Direction}


def _of_pass(asked: SearchQuestion, direction: Direction) -> list[Scored]:
    said = any(asked.options.get(name) for name in ("layout", "relayout"))
    layout = None if said else default_layout(asked.problem)
    found: list[Scored] = []
    refusals: dict[str, PlanError] = {}
    for method in asked.methods:
        search = PassSearch(replace(asked, methods=(method,)), direction, layout)
        search.run(stays=True)
        found += _best_few(asked, [one for one in search.scored if one.stays])
        refusals |= search.refusals
    if not found:
        name, error = next(iter(refusals.items()))
        raise PlanError(f"no method fits; {name}: {error}")
    found.sort(key=lambda one: (one.score, len(one.options)))
    fitting = [one for one in found if one.fits]
    different = _different(asked, fitting or found)
    return _simulated(PassSearch(asked, direction, layout), different)


def _best_few(asked: SearchQuestion, scored: Sequence[Scored]) -> list[Scored]:
    few = _different(asked, scored[: 2 * _OF_METHOD])[:_OF_METHOD]
    uncut = [one for one in scored if _is_uncut(one)]
    return [*few, *(one for one in uncut[:1] if one not in few)]


def _is_uncut(one: Scored) -> bool:
    return one.options.get("chunks", (1, 1)) == (1, 1) and "head_slices" not in one.options


def _different(asked: SearchQuestion, scored: Sequence[Scored]) -> list[Scored]:
    """Of those that make the same programs the first, which has the fewest words."""
    found: list[Scored] = []
    for one in scored:
        alike = [other for other in found if _looks(other) == _looks(one)]
        programs = [
            asked.plan(x.direction, x.name, x.options).direction(x.direction).programs[0]
            for x in (one, *alike)
            if alike
        ]
        if not any(program == programs[0] for program in programs[1:]):
            found.append(one)
    return found


def _looks(one: Scored) -> tuple[object, ...]:
    return one.seconds, one.peak_bytes, one.place, one.operations


def _simulated(search: PassSearch, scored: Sequence[Scored]) -> list[Scored]:
    """As far as the effort goes; what comes after is predicted by one rank."""
    found, operations = [], 0
    for one in scored:
        operations += one.operations
        if operations <= _EFFORT.simulated_operations:
            one = replace(search.simulate(one), timeline=None)
        found.append(one)
    return sorted(found, key=lambda one: one.seconds)
