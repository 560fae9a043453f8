"""Every legal setting of every method, read from the table: a new row is covered with no new test.

A setting has a *shape* (tile, team, Ulysses degree, inner ring: what must fit the ranks) and a
*manner* (closed choices and switches, which fit always). Shapes are listed in full; manners are
dealt to them in turn, or multiplied with them where a test can afford it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from itertools import count, islice, product
from random import Random
from typing import Any

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.parts.setting import Option
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.methods.table import Method
from mesh_attention.plan.problem.problem import Problem
from support.listed import stretches_for

__all__ = ["Setting", "deal", "every_setting", "listed", "manners", "refusal", "shapes"]

Setting = dict[str, Any]

_SHAPE = ("ulysses", "inner", "tile", "team")
# Neither a shape nor a closed choice. Those of the schedule and the mapping to nodes have tests of
# their own; chunks, slices of heads and stripes are dealt out here.
_OTHER = (
    "alpha", "backward_chunks", "backward_head_slices", "backward_tile", "chunks",
    "costs", "even_chunks", "gamma", "head_slices", "max_memory_bytes", "ranks_per_node",
    "short_start", "stretches", "stripe_block", "units_per_node",
)  # fmt: skip
_CHUNKS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 1))
_STRIPES = (1, 2, 1, 3)


def refusal(method: Method, problem: Problem, ranks: int) -> str | None:
    """What a method says when no setting of it runs on so many ranks."""
    try:
        make_plan(problem, ranks, method=method.name, directions=())
    except PlanError as error:
        return str(error)
    return None


def shapes(method: Method, problem: Problem, ranks: int) -> list[Setting]:
    """All shapes that fit, not only those worth trying; none where the method refuses."""
    if refusal(method, problem, ranks):
        return []
    options = method.options()
    degrees = ulysses_degrees(problem, ranks) if "ulysses" in options else [None]
    settings: list[Setting] = []
    for degree in degrees:
        units = ranks // (degree or 1)
        fitting: dict[str, list[Any]] = {
            "inner": [size for size, _ in factorisations(units)],
            "tile": list(factorisations(units)),
            "team": team_sizes(units),
        }
        names = [name for name in fitting if name in options]
        degree_setting = {} if degree is None else {"ulysses": degree}
        for values in product(*(fitting[name] for name in names)):
            settings.append(degree_setting | dict(zip(names, values, strict=True)))
    return settings


@cache
def manners(method: Method) -> list[Setting]:
    """All combinations of closed choices and switches, the layout among them."""
    options = method.options()
    names = [name for name in options if name not in (*_SHAPE, *_OTHER)]
    choices = [_choices(options[name]) for name in names]
    return [dict(zip(names, values, strict=True)) for values in product(*choices)]


def _choices(option: Option) -> list[Any]:
    if option.type is bool:
        return [False, True]
    if isinstance(option.type, type) and issubclass(option.type, StrEnum):
        return [choice.value for choice in option.type if choice.value != "auto"]
    if option.name == "layers":  # memory alone depends on it
        return [1]
    raise AssertionError(f"say in {__name__} what the option {option.name} may be")


def deal(
    method: Method, problem: Problem, ranks: int, *, at_least: int = 1, at_most: int | None = None
) -> Iterator[Setting]:
    """Every shape, each with another manner; again and again until there are `at_least`.

    With `at_most` a part of the shapes, spread over all of them.
    """
    fitting = shapes(method, problem, ranks)
    if at_most is not None and len(fitting) > at_most:
        fitting = [fitting[(2 * i + 1) * len(fitting) // (2 * at_most)] for i in range(at_most)]
    ways = manners(method)
    # Where there are many ways, short steps would stay with the first layouts.
    strides = (5, 7, 11, 13) if len(ways) < 100 else (67, 61, 71)
    stride = next(s for s in strides if len(ways) % s)
    wanted = max(at_least, len(fitting)) if fitting else 0
    for number in islice(count(), wanted):
        turn = number + ranks
        setting = fitting[number % len(fitting)] | ways[turn * stride % len(ways)]
        if setting["layout"] == "striped":
            setting["stripe_block"] = _STRIPES[turn % 4]
        setting |= listed(setting, problem.q_tokens, ranks, turn)
        if "chunks" in method.options():
            setting["chunks"] = _CHUNKS[turn % 5]
        if "even_chunks" in method.options() and setting["layout"] == "zigzag":
            setting["even_chunks"] = setting["ulysses"] > 1 and not setting["relayout"]
        if "short_start" in method.options():
            exchanges = setting["ulysses"] > 1 and not setting["relayout"]
            setting["short_start"] = exchanges and turn % 2 == 0
        if "head_slices" in method.options() and turn % 6 == 0:
            held = problem.kv_heads // (setting.get("ulysses") or 1)
            if 1 < held <= 8:
                setting["head_slices"] = (1, 1)  # tests also run it with fewer heads
        yield setting


def every_setting(method: Method, problem: Problem, ranks: int) -> Iterator[Setting]:
    """The whole product of shapes and manners."""
    for shape, manner in product(shapes(method, problem, ranks), manners(method)):
        yield shape | manner | listed(manner, problem.q_tokens, ranks, 0)


def listed(setting: Setting, tokens: int, ranks: int, seed: int) -> Setting:
    """What a setting must also say where its layout is listed."""
    return {"stretches": stretches_for(setting["layout"], Random(seed), tokens, ranks)}
