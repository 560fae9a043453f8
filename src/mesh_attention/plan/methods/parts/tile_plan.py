"""What methods on a tile grid share: layouts, devices, head groups, and the plan itself.

A builder makes a `TilePlanner` of its problem and options, asks it for the `TilePass` of each
direction, and ends with `planner.plan(passes)`. Options that do not fit are refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction, OnDemand, Pass, Plan
from mesh_attention.plan.methods.parts.assignment import Tile, patch_devices, patch_widths
from mesh_attention.plan.methods.parts.chunks import sizes_for
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.keep import Keep, kept_kinds
from mesh_attention.plan.methods.parts.lower import lowerings_of
from mesh_attention.plan.methods.parts.reduce import Combine, ReduceBy
from mesh_attention.plan.methods.parts.rotate import members_per_node
from mesh_attention.plan.methods.parts.setting import ChunkSetting, Setting
from mesh_attention.plan.methods.parts.tile_pass import TilePass
from mesh_attention.plan.problem.layout import Layout, LayoutKind, contiguous_shards
from mesh_attention.plan.problem.problem import Problem

Layouts = tuple[Layout, Layout]
UNCUT = PassCut((1, 1), (1,))
MAX_TASKS = 16  # kq * kkv: more chunks than that make calls too small for any kernel


@dataclass(frozen=True)
class SharedOptions(Setting):
    """Options that do not depend on how a method moves its blocks."""

    method: str = ""
    combine: Combine = Combine.AUTO
    alpha: int | None = None
    ulysses: int = 1
    units_per_node: int | None = None

    @classmethod
    def of(cls, method: str, setting: Setting, **chosen: Any) -> Self:
        """The fields that a setting has, by name, and the values that the method chose."""
        names = {field.name for field in fields(cls)}
        asked = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name in names}
        return cls(**{**asked, **chosen, "method": method})


def _layouts_of(problem: Problem, num_ranks: int, shared: SharedOptions) -> Layouts:
    """The layouts of queries and of keys inside the method."""
    if shared.relayout and shared.ulysses == num_ranks:
        # Every rank has all tokens of its heads in any layout: that of the shards is best.
        shared = replace(shared, layout=LayoutKind.CONTIGUOUS, stripe_block=1, stretches=None)
    kind = shared.layout
    if kind is None:
        kind = LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG
    if kind is LayoutKind.LISTED and problem.q_tokens != problem.keys:
        raise PlanError(
            f"layout=listed lists the positions of queries and keys alike, but there are "
            f"{problem.q_tokens} query and {problem.keys} key tokens"
        )
    q = Layout(kind, problem.q_tokens, num_ranks, shared.stripe_block, shared.stretches)
    if problem.q_tokens == problem.keys:
        return q, q
    return q, Layout(kind, problem.keys, num_ranks, shared.stripe_block, shared.stretches)


def _devices_of(tile: Tile, shared: SharedOptions) -> tuple[int, ...]:
    """The physical rank of each logical rank: in order, or by patches of the tile grid."""
    degree, width = shared.ulysses, shared.alpha
    if width is None and shared.units_per_node is None:
        return tuple(range(tile.num_ranks * degree))
    units, each = _patch_of_node(shared, tile)
    if width is None:
        width = _squarest_width(tile, units)
    elif width < 1:
        raise PlanError(f"alpha={width}: must be at least 1")
    places = [divmod(place, units) for place in patch_devices(tile.a, tile.b, units, width)]
    nodes = degree // each  # over which a patch of units is spread
    return tuple(
        ((patch * nodes + i // each) * units + place) * each + i % each
        for patch, place in places
        for i in range(degree)
    )


def _patch_of_node(shared: SharedOptions, tile: Tile) -> tuple[int, int]:
    """The number of units of which a node has ranks, and of ranks of each."""
    p, degree, units = shared.ranks_per_node, shared.ulysses, shared.units_per_node
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


def _squarest_width(tile: Tile, units: int) -> int:
    fits = patch_widths(tile.a, tile.b, units)
    if not fits:
        raise PlanError(
            f"units_per_node={units}: {units} units form no patch of the {tile.b}x{tile.a} grid of "
            f"tiles {tile.a}x{tile.b}; leave 'units_per_node' out"
        )
    return min(fits, key=lambda width: (max(width, units // width), -width))


def reduce_by(
    problem: Problem, shared: SharedOptions, tile: Tile, nodes: tuple[int, ...]
) -> ReduceBy:
    """Auto: partials that could be added inside a node should not each leave it."""
    if shared.combine is not Combine.AUTO:
        return ReduceBy(shared.combine.value)
    groups = [tile.q_group(r) for r in range(tile.b)]
    if all(len({nodes[unit] for unit in group}) == 1 for group in groups):
        return ReduceBy.EXCHANGE
    exact = problem.element_bytes == problem.accumulate_bytes
    return ReduceBy.REDUCE_SCATTER if exact else ReduceBy.NODES


_CUTS = ("chunks", "backward_chunks", "head_slices", "backward_head_slices")


def is_cut(setting: ChunkSetting) -> bool:
    return any(getattr(setting, name) is not None for name in _CUTS)


def cut_of(setting: ChunkSetting, direction: Direction, problem: Problem, degree: int) -> PassCut:
    """Chunks, and sizes of the slices of heads; those of the backward pass default to the forward
    ones."""
    names = ["chunks", "head_slices"]
    if direction is Direction.BACKWARD:
        names = [
            f"backward_{name}" if getattr(setting, f"backward_{name}") else name for name in names
        ]
    kq, kkv = chunks = getattr(setting, names[0]) or (1, 1)
    if kq < 1 or kkv < 1 or kq * kkv > MAX_TASKS:
        raise PlanError(
            f"{names[0]}={kq}x{kkv}: both must be at least 1 and their product at most {MAX_TASKS}"
        )
    slices = sizes_for(problem, degree, getattr(setting, names[1]), names[1])
    return PassCut(chunks, slices)


class TilePlanner:
    """The parts of a plan that do not depend on how a method moves its blocks."""

    def __init__(self, problem: Problem, num_ranks: int, shared: SharedOptions, tile: Tile) -> None:
        self._problem = problem
        self._shared = shared
        self.layouts = _layouts_of(problem, num_ranks, shared)
        self._devices = _devices_of(tile, shared)
        self.shards: Layouts | None = None  # of the caller's tensors, where they are others
        if shared.relayout:
            q, kv = (contiguous_shards(layout.num_tokens, self._devices) for layout in self.layouts)
            self.shards = None if (q, kv) == self.layouts else (q, kv)
        per_node = shared.ranks_per_node  # all in one node where that is not known
        firsts = self._devices[:: shared.ulysses]  # the first rank of each unit
        self.nodes = tuple(device // per_node if per_node else 0 for device in firsts)
        self.lowerings = lowerings_of(*self.layouts, problem.rows, one_call=shared.one_call)

    def tile_passes(
        self,
        direction: Direction,
        tile: Tile,
        cut: PassCut = UNCUT,
        *,
        keep: Keep | None = None,
        rotates: tuple[bool, bool] = (True, True),
    ) -> OnDemand[TilePass]:
        """One pass on each head group. `keep`: another than asked for; `rotates`: whether queries,
        and keys, go round and are not gathered."""
        shared, nodes = self._shared, self.nodes
        by = reduce_by(self._problem, shared, tile, nodes)
        rows, columns = map(tile.q_group, range(tile.b)), map(tile.kv_group, range(tile.a))
        per_node = (members_per_node(rows, nodes) or 1, members_per_node(columns, nodes) or 1)
        degree, out = shared.ulysses, shared.gather_out
        # Rows that change their layout on the way are exchanged at once.
        whole = cut.chunks == (1, 1) and len(cut.slices) == 1
        exchanged = None if degree == 1 or self.shards is not None or whole else cut
        keep = keep or shared.keep
        kept = kept_kinds(keep, self._problem, degree)
        gathered = keep is Keep.GATHERED
        keeps_gathered = (gathered and not rotates[0], gathered and not rotates[1])

        def on_group(index: int) -> TilePass:
            group = HeadGroup(
                self._problem, *self.layouts, degree, index, self.shards, exchanged, kept
            )
            return TilePass(
                group,
                direction,
                tile,
                cut,
                by,
                gather_out=out,
                per_node=per_node,
                keeps_gathered=keeps_gathered,
            )

        return OnDemand(degree, on_group)

    def plan(self, passes: Iterable[Pass]) -> Plan:
        return Plan(
            self._problem,
            *self.layouts,
            tuple(passes),
            devices=self._devices,
            ranks_per_node=self._shared.ranks_per_node,
            method=self._shared.method,
            relayout=self.shards is not None,
        )
