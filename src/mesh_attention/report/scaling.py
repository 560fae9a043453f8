"""Strong and weak scaling of all methods: what one rank expects of settings found without a search.

Each method has its own choice and the best of its first answers, whichever is faster. A search at
every point would take minutes, and finds a few percent more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mesh_attention.choose.ranking import mfu_percent
from mesh_attention.choose.search import Score, Search
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.rates import rates_of
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.plan.methods.first_answer import first_answers, methods_with
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_OPERATIONS = 500  # of a rank: the next point of such a line would take seconds


class Scaling(StrEnum):
    STRONG = "strong"  # the same problem on more ranks
    WEAK = "weak"  # as many tokens on each rank


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Of all passes asked for."""

    ranks: int
    tokens: int
    seconds: float
    mfu_percent: float
    peak_bytes: int
    setting: str


@dataclass(frozen=True, slots=True)
class ScalingLine:
    scaling: Scaling
    name: str  # of the method
    points: tuple[ScalingPoint, ...]


def points_of_scaling(ranks: int, cluster: Cluster, most: int = RANKS[-1]) -> list[int]:
    """Numbers of ranks, that of the problem among them."""
    wanted = {*RANKS, ranks}
    return sorted(n for n in wanted if n <= min(max(most, ranks), cluster.num_ranks))


def scaling_lines(
    asked: Search,
    directions: Sequence[Direction],
    scaling: Scaling,
    at: Iterable[int],
    told: Callable[[], None],
) -> list[ScalingLine]:
    """Of every method that takes any of the points; none where the mask cannot have more tokens.
    `asked` is about the problem itself; its direction does not matter."""
    found: dict[str, list[ScalingPoint]] = {}
    ended: set[str] = set()
    for ranks in at:
        told()
        problem = asked.problem
        if scaling is Scaling.WEAK:
            problem = _with_tokens_of(problem, asked.num_ranks, ranks) or problem
            if problem is asked.problem and ranks != asked.num_ranks:
                continue
        searches = [
            replace(asked, problem=problem, num_ranks=ranks, direction=one) for one in directions
        ]
        first: dict[str, dict[str, Any]] = {}
        for answer in first_answers(problem, ranks, asked.given, rates_of(asked.cluster)):
            first.setdefault(answer.name, answer.options)
        for method in methods_with(asked.given):
            if method in ended:
                continue
            settings = [{}, first[method]] if first.get(method) else [{}]
            seen = [_best(search, method, settings) for search in searches]
            known = [one for one in seen if one is not None]
            if len(known) == len(seen):
                found.setdefault(method, []).append(_point(searches, known))
            if any(one.operations > MOST_OPERATIONS for one in known):
                ended.add(method)
    return [ScalingLine(scaling, method, tuple(points)) for method, points in found.items()]


@dataclass(frozen=True, slots=True)
class _Expected:
    """Of one pass: `operations` are those of a rank."""

    score: Score
    peak_bytes: int
    operations: int
    setting: str


def _best(search: Search, method: str, settings: Iterable[Mapping[str, Any]]) -> _Expected | None:
    found = []
    for setting in settings:
        try:
            plan = search.plan(method, {**setting, **search.given})
        except PlanError:
            continue
        seen = search.estimate(plan, (search.num_ranks // 2,))
        text = _setting_text(plan.direction(search.direction).setting)
        score = search.score(seen.seconds, seen.peak_bytes)
        operations = seen.num_operations // search.num_ranks
        found.append(_Expected(score, seen.peak_bytes, operations, text))
    return min(found, key=lambda one: one.score, default=None)


def _point(searches: Sequence[Search], seen: Sequence[_Expected]) -> ScalingPoint:
    one = searches[0]
    directions = [search.direction for search in searches]
    seconds = sum(expected.score[1] for expected in seen)
    return ScalingPoint(
        one.num_ranks,
        one.problem.q_tokens,
        seconds,
        mfu_percent(one.problem, directions, seconds, one.num_ranks, one.cluster),
        max(expected.peak_bytes for expected in seen),
        "; ".join(f"{d}: {e.setting}" for d, e in zip(directions, seen, strict=True)),
    )


def _with_tokens_of(problem: Problem, num_ranks: int, ranks: int) -> Problem | None:
    """The problem with as many tokens a rank; None where its mask is of given tokens."""
    mask = problem.mask
    if ranks != num_ranks and (mask.documents is not None or mask.slices is not None):
        return None
    tokens = [max(1, size * ranks // num_ranks) for size in (problem.q_tokens, problem.keys)]
    keys = None if problem.kv_tokens is None else tokens[1]
    try:
        return replace(problem, q_tokens=tokens[0], kv_tokens=keys)
    except MeshAttentionError:
        return None


def _setting_text(setting: Mapping[str, Any]) -> str:
    shown = ("ulysses", "tile", "team", "chunks", "head_slices")
    return " ".join(f"{name}={setting[name]}" for name in shown if name in setting)
