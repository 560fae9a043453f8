"""Estimates of the page: time by tile and slices, and scaling of all methods over ranks.

Both are what one rank expects of its own program, with all others on time: a search at every point
would take minutes and find a few percent more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from mesh_attention.choose.ranking import glance
from mesh_attention.choose.scored import SearchQuestion
from mesh_attention.cost.estimate import estimate
from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.table import METHODS, methods_with
from mesh_attention.plan.problem.problem import Problem

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_OPERATIONS = 60_000  # of all ranks: the next point of such a line would take seconds
MOST_SHAPES = 12  # of more, the best ones uncut are shown
MOST_SLICES = 16
HOPEFUL = 2.0  # times the best shape uncut: slower ones are not cut
_CUTS = ("chunks", "head_slices")


@dataclass(frozen=True, slots=True)
class TimedShape:
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Times of a method by tile and slices in one pass: `times[i][j]` is the time of shape i with
    `slices[j]` slices, None where the method refuses it. Slices are even and rows are not cut, so
    that the two axes say all; the search tries more."""

    name: str  # of the method
    direction: Direction
    shapes: tuple[str, ...]
    slices: tuple[int, ...]
    times: tuple[tuple[TimedShape | None, ...], ...]

    def taken(self) -> Iterator[tuple[str, int, TimedShape]]:
        """The shapes and numbers of slices that the method takes, with their times."""
        for shape, row in zip(self.shapes, self.times, strict=True):
            for number, timed in zip(self.slices, row, strict=True):
                if timed is not None:
                    yield shape, number, timed


def methods_with_shapes(options: Mapping[str, Any]) -> list[str]:
    """The methods whose tiles and slices `options` leave open."""
    if any(name.removeprefix("backward_") in _CUTS for name in options):
        return []
    return [
        name
        for name in methods_with(options)
        if {"tile", "head_slices"} <= METHODS[name].options().keys()
    ]


def shape_times(
    asked: SearchQuestion, direction: Direction, method: str, tell: Callable[[], None]
) -> ShapeTimes | None:
    """Times every tile uncut, then cuts the best ones into slices. None where the method takes no
    shape at all. `tell` is called after each setting, here and below."""
    rows: list[tuple[float, dict[str, Any], dict[int, TimedShape]]] = []
    uncut = {"chunks": (1, 1)} if "chunks" in METHODS[method].options() else {}
    for shape in _shapes(asked, method):
        setting = {**shape, **asked.options, **uncut}
        whole = _timed(asked, direction, method, setting)
        if whole is not None:
            rows.append((whole.seconds, setting, {1: whole}))
        tell()
    if not rows:
        return None
    rows.sort(key=lambda row: row[0])
    best = rows[0][0]
    rows = sorted(rows[:MOST_SHAPES], key=lambda row: (row[1].get("ulysses") or 1, row[1]["tile"]))
    for seconds, setting, times in rows:
        if seconds > HOPEFUL * best:
            continue
        held = max(1, asked.problem.kv_heads // METHODS[method].degree(setting, asked.num_ranks))
        size = held // 2
        while size and held <= MOST_SLICES * size:
            cut = setting | {"head_slices": (size, size)}
            timed = _timed(asked, direction, method, cut)
            if timed is not None:
                times[-(-held // size)] = timed
            size //= 2
        tell()
    slices = sorted({number for _, _, times in rows for number in times})
    return ShapeTimes(
        method,
        direction,
        tuple(_shape_text(setting) for _, setting, _ in rows),
        tuple(slices),
        tuple(tuple(times.get(number) for number in slices) for _, _, times in rows),
    )


def _shapes(asked: SearchQuestion, method: str) -> list[dict[str, Any]]:
    """All tiles, with each Ulysses degree that the method would try; without node patches."""
    ranks, options = asked.num_ranks, asked.options
    shapes: list[dict[str, Any]] = []
    for candidate in METHODS[method].candidates(asked.problem, ranks, asked.cluster.node.ranks):
        tried = candidate.get("ulysses")
        degree = {} if tried is None else {"ulysses": options.get("ulysses") or tried}
        units = ranks // METHODS[method].degree(degree, ranks)
        tiles = [options["tile"]] if options.get("tile") else factorisations(units)
        new = [degree | {"tile": tile} for tile in tiles]
        shapes += [shape for shape in new if shape not in shapes]
    return shapes


def _timed(
    asked: SearchQuestion, direction: Direction, method: str, setting: Mapping[str, Any]
) -> TimedShape | None:
    middle = (asked.num_ranks // 2,)
    try:
        plan = asked.plan(direction, method, setting)
        expected = estimate(plan, asked.cluster, direction, kernel=asked.kernel, ranks=middle)
    except PlanError:
        return None
    return TimedShape(expected.seconds, expected.peak_bytes)


def _shape_text(setting: Mapping[str, Any]) -> str:
    a, b = setting["tile"]
    degree = setting.get("ulysses")
    return f"{a}x{b}" if degree is None else f"ulysses {degree}, {a}x{b}"


class Scaling(StrEnum):
    STRONG = "strong"  # the same problem on more ranks
    WEAK = "weak"  # as many tokens on each rank


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A method at its most promising shape on so many ranks; numbers are those of all passes."""

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
    """Numbers of ranks, with that of the problem among them."""
    limit = min(max(most, ranks), cluster.num_ranks)
    return sorted(number for number in {*RANKS, ranks} if number <= limit)


def scaling_lines(
    asked: SearchQuestion,
    directions: Sequence[Direction],
    scaling: Scaling,
    at: Iterable[int],
    tell: Callable[[], None],
) -> list[ScalingLine]:
    """A line for each method that takes any of the points `at`. Weak scaling has no points where
    the mask cannot have more tokens. `asked` is about the problem itself."""
    lines: dict[str, list[ScalingPoint]] = {}
    ended: set[str] = set()
    for ranks in at:
        tell()
        problem: Problem | None = asked.problem
        if scaling is Scaling.WEAK and ranks != asked.num_ranks:
            problem = _scaled(asked.problem, asked.num_ranks, ranks)
        if problem is None:
            continue
        for method in asked.methods:
            if method in ended:
                continue
            try:
                row = glance(replace(asked, problem=problem, num_ranks=ranks), method, directions)
            except PlanError:
                continue
            setting = "; ".join(
                f"{direction}: {row.setting(direction)}" for direction in row.passes
            )
            numbers = row.seconds, row.mfu_percent, row.peak_bytes
            point = ScalingPoint(ranks, problem.q_tokens, *numbers, setting)
            lines.setdefault(method, []).append(point)
            if any(scored.operations > MOST_OPERATIONS for scored in row.passes.values()):
                ended.add(method)
    return [ScalingLine(scaling, method, tuple(points)) for method, points in lines.items()]


def _scaled(problem: Problem, num_ranks: int, ranks: int) -> Problem | None:
    """The problem with as many tokens a rank; None where its mask is of fixed tokens."""
    if problem.mask.documents is not None or problem.mask.slices is not None:
        return None
    queries, keys = (max(1, n * ranks // num_ranks) for n in (problem.q_tokens, problem.keys))
    kv_tokens = None if problem.kv_tokens is None else keys
    try:
        return replace(problem, q_tokens=queries, kv_tokens=kv_tokens)
    except MeshAttentionError:
        return None
