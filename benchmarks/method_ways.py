"""What `predicted_against_measured.py` runs: each method at its best setting, by a cluster alone.

What defines a method is given (`defining`), the rest is searched for each pass; `auto` is searched
over all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from method_steps import say
from prediction_report import AUTO, UNCUT, Predicted

from mesh_attention.choose.auto import find_best
from mesh_attention.cost import Cluster, simulate
from mesh_attention.plan.language.text import plan_text
from mesh_attention.plan.methods.question import BOTH, Question
from mesh_attention.plan.methods.table import METHODS as METHOD_TABLE
from mesh_attention.plan.problem.problem import Problem

METHODS = ("ring", "usp", "ulysses", "startrail", "mesh", "mesh-usp")
WHOLE: Mapping[str, Any] = {"chunks": (1, 1), "head_slices": None}  # one chunk, one slice


@dataclass(frozen=True)
class Way(Predicted):
    question: Question


def defining(method: str, num_ranks: int) -> dict[str, Any]:
    """What makes a method itself: left free, USP may become Ulysses, and StarTrail a ring."""
    inside = {"ulysses": 4}  # as many as a node has ranks
    of = {
        "usp": inside,
        "startrail": {"team": 2},
        "mesh-usp": {"ulysses": 2, "tile": (2, 2)} if num_ranks == 8 else inside | {"tile": (2, 2)},
        "mesh": {"tile": (2, 4) if num_ranks == 8 else (4, 4)},
    }
    return of.get(method, {})


def ways(problem: Problem, num_ranks: int, cluster: Cluster) -> list[Way]:
    found = [_way(method, problem, num_ranks, cluster) for method in METHODS]
    best = find_best(problem, num_ranks, cluster)
    say(f"auto: {', '.join(one.text for one in best.chosen.values())}")
    return [*found, _as_way(AUTO, best.question, cluster)]


def with_uncut(
    found: Sequence[Way], problem: Problem, num_ranks: int, cluster: Cluster
) -> list[Way]:
    """And an all-gather of keys and values, and whatever was cut without its cuts."""
    found = [_way("allgather-kv", problem, num_ranks, cluster), *found]
    others = []
    for way in found:
        if way.name == AUTO:
            best = find_best(problem, num_ranks, cluster, options=WHOLE)
            other = _as_way(AUTO, best.question, cluster)
        else:
            has = METHOD_TABLE[way.name].options()
            whole = {name: value for name, value in WHOLE.items() if name in has}
            other = _way(way.name, problem, num_ranks, cluster, whole)
        if plan_text(other.question.plan()) != plan_text(way.question.plan()):
            others.append(replace(other, name=f"{way.name}{UNCUT}"))
    return [*found, *others]


def _way(
    method: str,
    problem: Problem,
    num_ranks: int,
    cluster: Cluster,
    options: Mapping[str, Any] | None = None,
) -> Way:
    """Both passes at their best; where these want other shards, the one that loses less."""
    given = defining(method, num_ranks) | dict(options or {})
    best = find_best(problem, num_ranks, cluster, method=method, options=given)
    return _as_way(method, best.question, cluster)


def _as_way(name: str, question: Question, cluster: Cluster) -> Way:
    plan = question.plan()
    timelines = [simulate(plan, cluster, direction) for direction in BOTH]
    told = [
        " ".join([one.method, *(f"{n}={_word(x)}" for n, x in _given(one).items())])
        for one in (question, question.backward or question)
    ]
    seconds = tuple(one.runtime_seconds for one in timelines)
    return Way(name, tuple(told), seconds, question)


def _given(question: Question) -> Mapping[str, Any]:
    """The options that are not left to their default."""
    setting = question.setting
    usual = type(setting)()
    hidden = ("costs", "ranks_per_node")
    names = [one.name for one in fields(setting) if one.name not in hidden]
    return {
        name: value for name in names if (value := getattr(setting, name)) != getattr(usual, name)
    }


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
