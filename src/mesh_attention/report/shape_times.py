"""Time by tile and number of slices of heads, for every method that has both: as one rank expects.

Slices are even here and rows are not cut, so that the two axes say all; the search tries more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.scored import SearchQuestion
from mesh_attention.cost.estimate import estimate
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.methods.table import METHODS, methods_with

MOST_SHAPES = 12  # of more the best ones, uncut, are shown
MOST_SLICES = 16
_CUTS = ("chunks", "head_slices")
HOPEFUL = 2.0  # times the best shape uncut: slower ones are not cut


@dataclass(frozen=True, slots=True)
class TimedShape:
    """Of one setting: None where the method does not take it."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """`times[i][j]` is that of shape i with `slices[j]` slices."""

    name: str  # of the method
    direction: Direction
    shapes: tuple[str, ...]
    slices: tuple[int, ...]
    times: tuple[tuple[TimedShape | None, ...], ...]


def methods_with_shapes(given: Mapping[str, Any]) -> list[str]:
    """Those with tiles and slices that are free to be chosen."""
    if any(name.removeprefix("backward_") in _CUTS for name in given):
        return []
    return [
        name
        for name in methods_with(given)
        if {"tile", "head_slices"} <= METHODS[name].options().keys()
    ]


def shape_times(
    asked: SearchQuestion, direction: Direction, method: str, told: Callable[[], None]
) -> ShapeTimes | None:
    """None where the method takes no shape at all."""
    rows: list[tuple[float, dict[str, Any], dict[int, TimedShape]]] = []
    uncut = {"chunks": (1, 1)} if "chunks" in METHODS[method].options() else {}
    for shape in _shapes(asked, method):
        setting = {**shape, **asked.options, **uncut}
        whole = _timed(asked, direction, method, setting)
        if whole is not None:
            rows.append((whole.seconds, setting, {1: whole}))
        told()
    rows.sort(key=lambda row: row[0])
    best = rows[0][0] if rows else 0.0
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
        told()
    if not rows:
        return None
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
    problem, ranks, given = asked.problem, asked.num_ranks, asked.options
    found: list[dict[str, Any]] = []
    for candidate in METHODS[method].candidates(problem, ranks, asked.cluster.node.ranks):
        tried = candidate.get("ulysses")
        degree = {} if tried is None else {"ulysses": given.get("ulysses") or tried}
        units = ranks // METHODS[method].degree(degree, ranks)
        tiles = [given["tile"]] if given.get("tile") else factorisations(units)
        found += [one for tile in tiles if (one := degree | {"tile": tile}) not in found]
    return found


def _timed(
    asked: SearchQuestion, direction: Direction, method: str, setting: Mapping[str, Any]
) -> TimedShape | None:
    middle = (asked.num_ranks // 2,)
    try:
        plan = asked.plan(direction, method, setting)
        seen = estimate(plan, asked.cluster, direction, kernel=asked.kernel, ranks=middle)
    except PlanError:
        return None
    return TimedShape(seen.seconds, seen.peak_bytes)


def _shape_text(setting: Mapping[str, Any]) -> str:
    a, b = setting["tile"]
    degree = setting.get("ulysses")
    return f"{a}x{b}" if degree is None else f"ulysses {degree}, {a}x{b}"
