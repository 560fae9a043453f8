"""Settings worth trying when the best one of a method is looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh_attention.plan.assignment import best_tile, factorisations
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.methods.strand import ulysses_degrees
from mesh_attention.plan.problem import Problem

__all__ = ["Candidates", "degrees", "inner_rings", "one", "teams", "tiles", "unit_tiles"]

Settings = list[dict[str, Any]]
Candidates = Callable[[Problem, int, int | None], Settings]


def one(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """Nothing to choose."""
    return [{}]


def tiles(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """Tiles near the one that moves the fewest bytes, with every node patch that fits."""
    best = best_tile(ranks, problem)[0]
    near = [(a, b) for a, b in factorisations(ranks) if best / 2 <= a <= best * 2]
    return [
        {"tile": tile} | ({"alpha": alpha} if alpha else {})
        for tile in near
        for alpha in (None, *_patches(tile, ranks_per_node))
    ]


def _patches(tile: tuple[int, int], ranks_per_node: int | None) -> list[int]:
    """Widths of patches of whole tiles; the one that is row by row already is left out."""
    if ranks_per_node is None:
        return []
    a, b = tile
    return [
        width
        for width in range(1, ranks_per_node)
        if ranks_per_node % width == 0 and a % width == 0 and b % (ranks_per_node // width) == 0
    ]


def degrees(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """All degrees that work; 1, which swaps nothing, only where there is no other."""
    fits = ulysses_degrees(problem, ranks)
    return [{"ulysses": u} for u in fits if u > 1 or len(fits) == 1]


def unit_tiles(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    settings: Settings = []
    for degree in degrees(problem, ranks, ranks_per_node):
        units = ranks // degree["ulysses"]
        best = best_tile(units, problem)[0]
        near = [t for t in factorisations(units) if best / 2 <= t[0] <= best * 2]
        settings += [degree | {"tile": tile} for tile in near]
    return settings


def inner_rings(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    """Inner rings as large as what a degree of Ulysses leaves of a node. Beyond a node there is
    only one ring: of those degrees the largest."""
    node = ranks_per_node or 8
    fits = ulysses_degrees(problem, ranks)
    settings: Settings = []
    for degree in [u for u in fits if u <= node or u == fits[-1]]:
        most = max(node // degree, 1)
        inner = max(size for size, _ in factorisations(ranks // degree) if size <= most)
        settings.append({"ulysses": degree, "inner": inner})
    return settings


def teams(problem: Problem, ranks: int, ranks_per_node: int | None) -> Settings:
    return [{"team": team} for team in team_sizes(ranks)]
