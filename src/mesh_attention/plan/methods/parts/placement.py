"""Which device each rank of a grid of units is, so that neighbours share a node.

algorithm.md, section 6. Tokens do not move with it: a rank owns the partition of its device. Used
by all builders on tiles, and by the bounds of searches. Pure arithmetic of ranks.
"""

from __future__ import annotations

from mesh_attention.errors import PlanError
from mesh_attention.plan.methods.parts.assignment import Tile

PLACES = ("alpha", "units_per_node")  # options that say on which device a rank is


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
