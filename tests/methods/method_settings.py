"""Every legal setting of every method, read from the table: a new row is covered with no new test.

A setting has a *shape* (tile, team, Ulysses degree, inner ring: what must fit the ranks) and a
*manner* (closed choices and switches, which fit always). Shapes multiply; manners are either
multiplied too or dealt out in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import product
from typing import Any, get_args, get_type_hints

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import factorisations
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.methods.strand import ulysses_degrees
from mesh_attention.plan.methods.table import METHODS, Method, make_plan
from mesh_attention.plan.problem import Problem

__all__ = ["CHUNKS", "OTHER", "SHAPE", "deal", "manners", "shapes"]

Setting = dict[str, Any]

SHAPE = ("ulysses", "inner", "tile", "team")
# Options that neither shape a plan nor are a closed choice; tests of the mesh go through them.
OTHER = (
    "alpha", "backward_chunks", "backward_tile", "chunks", "costs", "gamma", "max_buffer_bytes",
    "ranks_per_node", "scheduler", "stripe_block",
)  # fmt: skip
CHUNKS = ((1, 1), (2, 1), (1, 2), (2, 2))


def shapes(method: Method, problem: Problem, ranks: int) -> list[Setting]:
    """All shapes of a method that fit; none where the method cannot run on so many ranks."""
    if refusal(method, problem, ranks):
        return []
    options = method.options()
    found: list[Setting] = [{}]
    if "ulysses" in options:
        found = [{"ulysses": degree} for degree in ulysses_degrees(problem, ranks)]
    fitting: list[Setting] = []
    for setting in found:
        units = ranks // setting.get("ulysses", 1)
        choices: dict[str, list[Any]] = {
            "inner": [size for size, _ in factorisations(units)],
            "tile": list(factorisations(units)),
            "team": team_sizes(units),
        }
        named = [name for name in choices if name in options]
        for values in product(*(choices[name] for name in named)):
            fitting.append(setting | dict(zip(named, values, strict=True)))
    return fitting


def refusal(method: Method, problem: Problem, ranks: int) -> str | None:
    """What the method says when it cannot run on so many ranks, whatever the setting."""
    try:
        make_plan(problem, ranks, method=method.name, directions=())
    except PlanError as error:
        return str(error)
    return None


def manners(method: Method) -> list[Setting]:
    """All combinations of closed choices and switches, the layout among them."""
    kinds = get_type_hints(method.setting)
    choices: dict[str, list[Any]] = {}
    for name in method.options():
        if name in SHAPE or name in OTHER:
            continue
        choices[name] = _choices(kinds[name])
        assert choices[name], f"say in {__name__} what option {name} of {method.name} may be"
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _choices(kind: Any) -> list[Any]:
    for one in (kind, *get_args(kind)):
        if one is bool:
            return [False, True]
        if isinstance(one, type) and issubclass(one, StrEnum):
            return [choice.value for choice in one if choice.value != "auto"]
    return []


def deal(method: Method, problem: Problem, ranks: int, start: int = 0) -> Iterator[Setting]:
    """Every shape once, each with another manner: a stride that is prime to their number."""
    ways = manners(method)
    stride = next(s for s in (7, 5, 11, 13) if len(ways) % s)
    chunked = "chunks" in method.options()
    for number, shape in enumerate(shapes(method, problem, ranks), start):
        way = ways[number * stride % len(ways)]
        chunks = {"chunks": CHUNKS[number % len(CHUNKS)]} if chunked else {}
        yield shape | way | chunks


def all_methods() -> list[str]:
    return list(METHODS)
