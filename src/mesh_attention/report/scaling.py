"""Strong and weak scaling of all methods: what one rank sees of the most promising shape of each.

A search at every point would take minutes, and finds a few percent more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mesh_attention.choose.ranking import RankedMethod, glance
from mesh_attention.choose.scored import SearchQuestion
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.problem import Problem

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_OPERATIONS = 60_000  # of all ranks: the next point of such a line would take seconds


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
    asked: SearchQuestion,
    directions: Sequence[Direction],
    scaling: Scaling,
    at: Iterable[int],
    told: Callable[[], None],
) -> list[ScalingLine]:
    """Of every method that takes any of the points; none where the mask cannot have more tokens.
    `asked` is about the problem itself."""
    found: dict[str, list[ScalingPoint]] = {}
    ended: set[str] = set()
    for ranks in at:
        told()
        problem = asked.problem
        if scaling is Scaling.WEAK:
            problem = _with_tokens_of(problem, asked.num_ranks, ranks) or problem
            if problem is asked.problem and ranks != asked.num_ranks:
                continue
        for method in asked.methods:
            if method in ended:
                continue
            try:
                row = glance(replace(asked, problem=problem, num_ranks=ranks), method, directions)
            except PlanError:
                continue
            found.setdefault(method, []).append(_point(row))
            if any(one.operations > MOST_OPERATIONS for one in row.passes.values()):
                ended.add(method)
    return [ScalingLine(scaling, method, tuple(points)) for method, points in found.items()]


def _point(row: RankedMethod) -> ScalingPoint:
    return ScalingPoint(
        row.asked.num_ranks,
        row.asked.problem.q_tokens,
        row.seconds,
        row.mfu_percent,
        row.peak_bytes,
        "; ".join(f"{direction}: {row.setting(direction)}" for direction in row.passes),
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
