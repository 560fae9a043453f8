"""Time by tile and number of slices of heads, for every method that has both: as one rank expects.

Slices are even here and rows are not cut, so that the two axes say all; the search tries more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mesh_attention.choose.cuts import Cut, free_names
from mesh_attention.choose.search import Search
from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import factorisations
from mesh_attention.plan.methods.first_answer import methods_with
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction

MOST_SHAPES = 12  # of more the best ones, uncut, are shown
MOST_SLICES = 16
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
    return [
        name
        for name in methods_with(given)
        if "tile" in METHODS[name].options() and "head_slices" in free_names(_options(name), given)
    ]


def shape_times(search: Search, method: str, told: Callable[[], None]) -> ShapeTimes | None:
    """None where the method takes no shape at all."""
    free = free_names(_options(method), search.given)
    rows: list[tuple[float, dict[str, Any], dict[int, TimedShape]]] = []
    for shape in _shapes(search, method):
        setting = {**shape, **search.given}
        whole = _timed(search, method, setting | Cut((1, 1), None, 1).options(free))
        if whole is not None:
            rows.append((whole.seconds, setting, {1: whole}))
        told()
    rows.sort(key=lambda row: row[0])
    best = rows[0][0] if rows else 0.0
    rows = sorted(rows[:MOST_SHAPES], key=lambda row: (row[1].get("ulysses") or 1, row[1]["tile"]))
    for seconds, setting, times in rows:
        if seconds > HOPEFUL * best:
            continue
        held = max(1, search.problem.kv_heads // _degree(search, method, setting))
        size = held // 2
        while size and held <= MOST_SLICES * size:
            cut = setting | Cut((1, 1), (size, size), held).options(free)
            timed = _timed(search, method, cut)
            if timed is not None:
                times[-(-held // size)] = timed
            size //= 2
        told()
    if not rows:
        return None
    slices = sorted({number for _, _, times in rows for number in times})
    return ShapeTimes(
        method,
        search.direction,
        tuple(_shape_text(setting) for _, setting, _ in rows),
        tuple(slices),
        tuple(tuple(times.get(number) for number in slices) for _, _, times in rows),
    )


def _options(method: str) -> list[str]:
    return list(METHODS[method].options())


def _shapes(search: Search, method: str) -> list[dict[str, Any]]:
    """All tiles, with each Ulysses degree that the method would try; without node patches."""
    problem, ranks, node = search.problem, search.num_ranks, search.cluster.node.ranks
    wanted = search.given.get("ulysses")
    found: list[dict[str, Any]] = []
    for candidate in METHODS[method].candidates(problem, ranks, node):
        tried = candidate.get("ulysses")
        degree = {} if tried is None else {"ulysses": wanted or tried}
        units = ranks // METHODS[method].degree(degree, ranks)
        tiles = [search.given["tile"]] if search.given.get("tile") else factorisations(units)
        found += [one for tile in tiles if (one := degree | {"tile": tile}) not in found]
    return found


def _degree(search: Search, method: str, setting: Mapping[str, Any]) -> int:
    return METHODS[method].degree(setting, search.num_ranks)


def _timed(search: Search, method: str, setting: Mapping[str, Any]) -> TimedShape | None:
    try:
        seen = search.estimate(search.plan(method, setting), (search.num_ranks // 2,))
    except PlanError:
        return None
    return TimedShape(seen.seconds, seen.peak_bytes)


def _shape_text(setting: Mapping[str, Any]) -> str:
    a, b = setting["tile"]
    degree = setting.get("ulysses")
    return f"{a}x{b}" if degree is None else f"ulysses {degree}, {a}x{b}"
