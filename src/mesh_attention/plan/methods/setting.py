"""What a person can choose about a method: the options that several methods share, said once.

A method's own setting stands with its builder and adds its own options; every option has a default.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.home import Combine
from mesh_attention.plan.layout import LayoutKind

__all__ = ["Setting", "TileSetting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of every method; None means: choose for me.

    layout, stripe_block  which token lies where
    gather_out            backward gathers O as the paper does, instead of delta
    ranks_per_node        of the machine, for what depends on nodes
    """

    layout: LayoutKind | None = None
    stripe_block: int = 1
    gather_out: bool = False
    ranks_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class TileSetting(Setting):
    """Options of methods on a tile grid.

    tile                  (a, b)
    combine               how partial results come home
    alpha                 a node is an alpha-wide patch of the tile grid (needs ranks_per_node)
    """

    tile: tuple[int, int] | None = None
    combine: Combine = Combine.AUTO
    alpha: int | None = None
