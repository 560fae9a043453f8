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
    best = find_best(problem, num_ranks, cluster)
    say(f"auto: {', '.join(scored.text for scored in best.chosen.values())}")
    methods = [_way(method, problem, num_ranks, cluster) for method in METHODS]
    return [*methods, _as_way(AUTO, best.question, cluster)]


def with_uncut(cut: Sequence[Way], problem: Problem, num_ranks: int, cluster: Cluster) -> list[Way]:
    """Adds an all-gather of keys and values, and each way that has cuts once more without them."""
    cut = [_way("allgather-kv", problem, num_ranks, cluster), *cut]
    uncut = []
    for way in cut:
        if way.name == AUTO:
            best = find_best(problem, num_ranks, cluster, options=WHOLE)
            other = _as_way(AUTO, best.question, cluster)
        else:
            has = METHOD_TABLE[way.name].options()
            whole = {name: value for name, value in WHOLE.items() if name in has}
            other = _way(way.name, problem, num_ranks, cluster, whole)
        if plan_text(other.question.plan()) != plan_text(way.question.plan()):
            uncut.append(replace(other, name=f"{way.name}{UNCUT}"))
    return [*cut, *uncut]


def _way(
    method: str,
    problem: Problem,
    num_ranks: int,
    cluster: Cluster,
    options: Mapping[str, Any] | None = None,
) -> Way:
    """Both passes at their best; where these want other shards, the pair that loses less."""
    fixed = defining(method, num_ranks) | dict(options or {})
    best = find_best(problem, num_ranks, cluster, method=method, options=fixed)
    return _as_way(method, best.question, cluster)


def _as_way(name: str, question: Question, cluster: Cluster) -> Way:
    plan = question.plan()
    seconds = [simulate(plan, cluster, direction).runtime_seconds for direction in BOTH]
    settings = [_setting_text(of) for of in (question, question.backward or question)]
    return Way(name, tuple(settings), tuple(seconds), question)


def _setting_text(question: Question) -> str:
    """The method, and the options that are not left to their default."""
    setting = question.setting
    usual = type(setting)()
    words = [question.method]
    for name in (field.name for field in fields(setting)):
        value = getattr(setting, name)
        if name not in ("costs", "ranks_per_node") and value != getattr(usual, name):
            text = "x".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"{name}={text}")
    return " ".join(words)
