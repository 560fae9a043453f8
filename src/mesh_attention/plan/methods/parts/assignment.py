"""Who computes what: tiles, KV rotation, groups and the node mapping.

algorithm.md, sections 1 to 3 and 6. The grid of (Q partition, KV partition) cells is cut into tiles
of `a` rows by `b` columns; rank g sits at tile row `g // a`, tile column `g % a`. With rotation a
tile column takes the KV partitions of its own ranks, so the exchange is a plain all-gather. Used by
all builders on tiles, and by searches over them. Pure arithmetic of ranks.
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
