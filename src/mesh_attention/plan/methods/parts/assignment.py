"""Who computes what, and on which device: tiles, KV rotation, groups and the node mapping.

algorithm.md, sections 1 to 3 and 6. The grid of (Q partition, KV partition) cells is cut into tiles
of `a` rows by `b` columns; rank g sits at tile row `g // a`, tile column `g % a`. With rotation a
tile column takes the KV partitions of its own ranks, so the exchange is a plain all-gather.

`devices_of` says which device each rank of the grid is, so that neighbours share a node. Tokens do
not move with it: a rank owns the partition of its device. All builders on tiles use this file, and
so do searches over tiles. Pure arithmetic of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.problem import Problem

Assignment = NDArray[np.int64]  # [Q partition, KV partition] -> rank
PLACES = ("alpha", "units_per_node")  # options that say on which device a rank is


@dataclass(frozen=True, slots=True)
class Tile:
    """`a` Q partitions by `b` KV partitions.

    >>> Tile(3, 5).q_group(0), Tile(3, 5).kv_group(0)
    ((0, 1, 2), (0, 3, 6, 9, 12))
    """

    a: int
    b: int
    rotation: bool = True

    def __post_init__(self) -> None:
        if self.a < 1 or self.b < 1:
            raise PlanError(f"tile {self.a}x{self.b}: both sides must be at least 1")

    def __str__(self) -> str:
        return f"{self.a}x{self.b}"

    @property
    def num_ranks(self) -> int:
        return self.a * self.b

    def row(self, rank: int) -> int:
        return rank // self.a

    def column(self, rank: int) -> int:
        return rank % self.a

    def q_group(self, row: int) -> tuple[int, ...]:
        return tuple(range(row * self.a, (row + 1) * self.a))

    def kv_group(self, column: int) -> tuple[int, ...]:
        """The ranks of a tile column: they all use the same KV partitions."""
        return tuple(range(column, self.num_ranks, self.a))

    def kv_partitions(self, column: int) -> tuple[int, ...]:
        """KV partitions of a tile column; with rotation those of its own ranks."""
        if self.rotation:
            return self.kv_group(column)
        return tuple(range(column * self.b, (column + 1) * self.b))

    def kv_users(self, partition: int) -> tuple[int, ...]:
        """The ranks that need a KV partition."""
        return self.kv_group(partition % self.a if self.rotation else partition // self.b)

    def assignment(self) -> Assignment:
        matrix = np.full((self.num_ranks, self.num_ranks), -1, dtype=np.int64)
        for rank in range(self.num_ranks):
            q = self.q_group(self.row(rank))
            matrix[np.ix_(q, self.kv_partitions(self.column(rank)))] = rank
        return matrix


def factorisations(num_ranks: int) -> Iterator[tuple[int, int]]:
    for a in range(1, num_ranks + 1):
        if num_ranks % a == 0:
            yield a, num_ranks // a


def best_tile(num_ranks: int, problem: Problem) -> tuple[int, int]:
    """The tile that moves the fewest forward bytes; among equals the squarest, then more KV.

    >>> best_tile(256, Problem(q_tokens=1024, num_heads=64, head_dim=128))
    (16, 16)
    >>> best_tile(256, Problem(q_tokens=1024, num_heads=64, num_kv_heads=8, head_dim=128))
    (8, 32)
    """
    q = problem.q_tokens * problem.num_heads * (problem.head_dim + problem.v_dim)
    kv = problem.keys * problem.kv_heads * (problem.head_dim + problem.v_dim)

    def key(tile: tuple[int, int]) -> tuple[int, Fraction, int]:
        a, b = tile
        return q * (a - 1) + kv * (b - 1), Fraction(max(a, b), min(a, b)), a

    return min(factorisations(num_ranks), key=key)


def squarest(ranks: int) -> tuple[int, int]:
    return max((a, b) for a, b in factorisations(ranks) if a <= b)


def tile_for(shape: tuple[int, int], units: int, *, rotation: bool = True) -> Tile:
    """A tile of the grid of all units, or a refusal that names the tiles that fit."""
    tile = Tile(*shape, rotation)
    if tile.num_ranks != units:
        fits = ", ".join(f"{a}x{b}" for a, b in factorisations(units))
        raise PlanError(
            f"tile {tile} has {tile.num_ranks} cells but there are {units} ranks; "
            f"tiles that fit: {fits}"
        )
    return tile


def devices_of(
    tile: Tile,
    degree: int,
    ranks_per_node: int | None,
    *,
    alpha: int | None = None,
    units_per_node: int | None = None,
) -> tuple[int, ...]:
    """Of units of `degree` ranks: in order, or by patches of the grid, `alpha` wide.

    >>> devices_of(Tile(2, 2), 2, 4), devices_of(Tile(2, 2), 2, 4, units_per_node=4)
    ((0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7))
    """
    if alpha is None and units_per_node is None:
        return tuple(range(tile.num_ranks * degree))
    units, each = _patch_of_node(tile, degree, ranks_per_node, units_per_node)
    if alpha is None:
        if not patch_widths(tile.a, tile.b, units):
            raise PlanError(
                f"units_per_node={units}: {units} units form no patch of the {tile.b}x{tile.a} "
                f"grid of tiles {tile.a}x{tile.b}; leave 'units_per_node' out"
            )
        alpha = squarest_width(tile.a, tile.b, units)
    elif alpha < 1:
        raise PlanError(f"alpha={alpha}: must be at least 1")
    places = [divmod(place, units) for place in patch_devices(tile.a, tile.b, units, alpha)]
    nodes = degree // each  # over which a patch of units is spread
    return tuple(
        ((patch * nodes + i // each) * units + place) * each + i % each
        for patch, place in places
        for i in range(degree)
    )


def _patch_of_node(
    tile: Tile, degree: int, ranks_per_node: int | None, units: int | None
) -> tuple[int, int]:
    """The number of units of which a node has ranks, and of ranks of each."""
    p = ranks_per_node
    if p is None:
        name, it = "alpha", "it is the width of a node's patch of tiles"
        if units is not None:
            name, it = "units_per_node", "it says what a node has ranks of"
        raise PlanError(f"'{name}' needs ranks_per_node: {it}")
    if units is None:
        if p % degree:
            raise PlanError(
                f"'alpha' with Ulysses degree {degree} needs whole units in a node of {p} ranks; "
                "leave 'alpha' out, or say units_per_node"
            )
        return p // degree, degree
    # Tried by the ranks of a unit in a node, which are few; ranks_per_node may be any number.
    possible = [p // n for n in range(degree, 0, -1) if degree % n == 0 and p % n == 0]
    if units not in possible or units > tile.num_ranks:
        fits = [n for n in possible if n <= tile.num_ranks and patch_widths(tile.a, tile.b, n)]
        raise PlanError(
            f"units_per_node={units}: a node of {p} ranks has no such part of {tile.num_ranks} "
            f"units of {degree} ranks; units_per_node that fits tiles {tile.a}x{tile.b}: "
            f"{', '.join(map(str, fits)) or 'none'}"
        )
    return units, p // units


def patch_widths(a: int, b: int, ranks_per_node: int) -> list[int]:
    """Widths of patches of whole tiles that nodes can be."""
    p = ranks_per_node
    widths = range(1, min(a, p) + 1)
    return [w for w in widths if p % w == 0 and a % w == 0 and b % (p // w) == 0]


def squarest_width(a: int, b: int, ranks_per_node: int) -> int:
    """Of the widths that fit."""
    p = ranks_per_node
    return min(patch_widths(a, b, p), key=lambda width: (max(width, p // width), -width))


def patch_devices(a: int, b: int, ranks_per_node: int, alpha: int) -> tuple[int, ...]:
    """Physical rank of each logical rank when a node is an `alpha`-wide patch of the tile grid.

    The grid has b rows and a columns. Patches fill it row by row, and so do ranks inside a patch.
    """
    p = ranks_per_node
    fits = patch_widths(a, b, p)
    if alpha not in fits:
        way_out = f"alpha that fits: {', '.join(map(str, fits))}" if fits else "leave 'alpha' out"
        raise PlanError(
            f"alpha={alpha}: nodes of {p} ranks do not form {alpha}-wide patches of the "
            f"{b}x{a} grid of tiles {a}x{b}; {way_out}"
        )
    height, patches_across = p // alpha, a // alpha
    devices = []
    for g in range(a * b):
        row, column = divmod(g, a)
        patch = (row // height) * patches_across + column // alpha
        devices.append(patch * p + (row % height) * alpha + column % alpha)
    return tuple(devices)
