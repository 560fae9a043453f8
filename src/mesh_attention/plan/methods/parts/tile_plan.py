"""The parts that methods on a tile grid share: layouts, devices, head groups, and the plan itself.

A builder (`box.py`, `startrail.py`, `needed_rows.py`) makes a `TilePlanner` of its problem and
options, asks it for the `TilePass` of each direction, and ends with its `plan`. The mask matters
only where the options name no layout. Options that do not fit are refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import Any, Self
from weakref import proxy

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.buffers import Buffer, Kind, Piece
from mesh_attention.plan.language.plan import Direction, OnDemand, Pass, Plan
from mesh_attention.plan.language.program import Call, Communication, Operation, Task
from mesh_attention.plan.methods.parts.assignment import PLACES, Tile, devices_of, tile_for
from mesh_attention.plan.methods.parts.chunks import sizes_for
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.lower import Lowerings, Pair, attention, lowerings_of
from mesh_attention.plan.methods.parts.reduce import Combine, Pieces, ReduceBy
from mesh_attention.plan.methods.parts.rotate import GradientRoute, members_per_node
from mesh_attention.plan.methods.parts.setting import (
    CutSetting,
    DegreeSetting,
    Keep,
    Setting,
    TileSetting,
    kept_kinds,
)
from mesh_attention.plan.methods.parts.tile_side import TileSide, Tiling
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem

Layouts = tuple[Layout, Layout]
UNCUT = PassCut((1, 1), (1,))
MAX_TASKS = 16  # kq * kkv: more chunks than that make calls too small for any kernel


class Side(StrEnum):
    QUERIES = "queries"
    KEYS = "keys"


@dataclass(frozen=True)
class Box(TileSetting, DegreeSetting, CutSetting):
    """The options of a method and its own choices, of which StarTrail and needed rows make only the
    tile. Fields that are not named here are the options of these names.

    rotates    the side that goes round in blocks; the other side, or both, are gathered
    route      the way of results of rotating blocks to their owners; None: all at the end
    inner      units of an inner ring, in a double ring
    rotation   KV partition rotation; without it keys come by all-to-all
    """

    method: str = ""
    tile: tuple[int, int] = (1, 1)
    ulysses: int = 1
    backward_tile: tuple[int, int] | None = None
    rotates: Side | None = None
    route: GradientRoute | None = GradientRoute.DIRECT
    inner: int | None = None
    rotation: bool = True
    even_chunks: bool = False
    short_start: bool = False
    costs: Costs = field(default_factory=usual_costs)

    @classmethod
    def of(cls, method: str, setting: Setting, **chosen: Any) -> Self:
        """A box with the fields of a setting, and the values that the method chose."""
        names = {field.name for field in fields(cls)}
        asked = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name in names}
        return cls(**{**asked, **chosen, "method": method})


def layout_kind(problem: Problem, box: Box) -> LayoutKind:
    """The layout that the options name, or else the usual layout of the mask."""
    return box.layout or (LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG)


def _layouts_of(problem: Problem, num_ranks: int, box: Box) -> Layouts:
    """The layouts of queries and of keys inside the method."""
    if box.relayout and box.ulysses == num_ranks:
        # Every rank has all tokens of its heads in any layout, so the layout of shards is best.
        box = replace(box, layout=LayoutKind.CONTIGUOUS, stripe_block=1, stretches=None)
    kind = layout_kind(problem, box)
    if kind is LayoutKind.LISTED and problem.q_tokens != problem.keys:
        raise PlanError(
            f"layout=listed lists the positions of queries and keys alike, but there are "
            f"{problem.q_tokens} query and {problem.keys} key tokens"
        )
    q = Layout(kind, problem.q_tokens, num_ranks, box.stripe_block, box.stretches)
    if problem.q_tokens == problem.keys:
        return q, q
    return q, Layout(kind, problem.keys, num_ranks, box.stripe_block, box.stretches)


def _reduce_by(problem: Problem, box: Box, tile: Tile, nodes: tuple[int, ...]) -> ReduceBy:
    """By default, partial results that can be added inside a node do not leave it one by one."""
    if box.combine is not Combine.AUTO:
        return ReduceBy(box.combine.value)
    groups = [tile.q_group(r) for r in range(tile.b)]
    if all(len({nodes[unit] for unit in group}) == 1 for group in groups):
        return ReduceBy.EXCHANGE
    exact = problem.element_bytes == problem.accumulate_bytes
    return ReduceBy.REDUCE_SCATTER if exact else ReduceBy.NODES


@lru_cache(maxsize=64)  # of both passes, and all cuts
def _members_per_node(tile: Tile, nodes: tuple[int, ...]) -> tuple[int, int]:
    """Units of a row, and of a column, that follow each other in a node."""
    rows, columns = map(tile.q_group, range(tile.b)), map(tile.kv_group, range(tile.a))
    return members_per_node(rows, nodes), members_per_node(columns, nodes)


def cut_of(box: Box, direction: Direction, problem: Problem) -> PassCut:
    """Chunks, and sizes of the slices of heads. The backward pass has the options of the forward
    pass unless it has its own."""

    def option(name: str) -> tuple[str, tuple[int, int] | None]:
        other = f"backward_{name}"
        name = other if direction is Direction.BACKWARD and getattr(box, other) else name
        return name, getattr(box, name)

    name, chunks = option("chunks")
    kq, kkv = chunks = chunks or (1, 1)
    if kq < 1 or kkv < 1 or kq * kkv > MAX_TASKS:
        raise PlanError(
            f"{name}={kq}x{kkv}: both must be at least 1 and their product at most {MAX_TASKS}"
        )
    name, heads = option("head_slices")
    slices = sizes_for(problem, box.ulysses, heads, name)
    return PassCut(chunks, slices, box.even_chunks, box.short_start)


class TilePass:
    """One direction of a tile on one head group: its two sides, and the attentions between them.

    Forward: gather Q and KV, attend, reduce partial outputs. Backward: gather Q, dO and statistics,
    and KV; reduce gradients (algorithm.md, 2 to 5). `q` and `kv` are its sides; `parts` are the
    operations of a task that gathers or reduces, and `attend` is that of a task in between. They
    depend on a unit only through its tile row or column, so they are made once for each and shared:
    that keeps plans for thousands of ranks small. Orders and rings call it `tiles`.
    """

    def __init__(self, tiling: Tiling) -> None:
        self.head_group, self.direction = tiling.head_group, tiling.direction
        self.problem, self.tile = self.head_group.problem, tiling.tile
        self.slices = tiling.cut.slices  # of the heads: their sizes
        self.q, self.kv = (TileSide(tiling, keys=keys) for keys in (False, True))
        # Of the tasks that gather and reduce, by their kind.
        self.side_of = {
            kind: side
            for side in (self.q, self.kv)
            for kind in (side.gather_kind, side.reduce_kind)
        }
        self.keeps_gathered = self.q.keeps_gathered or self.kv.keeps_gathered
        self.needs = (*self.q.gathered, *self.kv.gathered)  # of which it reads a unit's own rows
        self._parts: dict[tuple[Task, int], list[list[Operation]]] = {}
        # Of compute tasks: all units have the same.
        self._operands: dict[Task, tuple[dict[Kind, Piece], Pair, Pieces]] = {}
        # A rank that runs asks for its own buffers, again for every mask.
        self.buffers = lru_cache(maxsize=2)(partial(TilePass._buffers, proxy(self)))

    @property
    def cut_setting(self) -> dict[str, str]:
        """How it is cut, for people."""
        cut, q_slots, kv_slots = self.head_group.cut, self.q.own.slots, self.kv.own.slots
        short = cut is not None and len(kv_slots) > cut.chunks[1]
        keys = self.kv.chunks_of_slice - short  # as they were asked for
        setting = {"chunks": f"{self.q.chunks_of_slice}x{keys}"}
        if len(self.slices) > 1:
            setting["head_slices"] = "+".join(map(str, self.slices))
        if any(len(spans) > 1 for spans in q_slots + kv_slots):  # of both halves of a zigzag
            setting["even_chunks"] = "on"
        if short:
            setting["short_start"] = "on"
        return setting

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Groups of units, by names that all head groups have alike."""
        return self.q.groups(self.tile.b) | self.kv.groups(self.tile.a)

    def attend(self, task: Task, calls: tuple[Call, ...], fresh: tuple[bool, bool]) -> Operation:
        """A chunk of queries against one of keys."""
        operands = self._operands.get(task)
        if operands is None:
            (i, j), sums = task.index, self.q.sums(task.index[0]) + self.kv.sums(task.index[1])
            operands = self._operands[task] = self.q.pieces(i), self.keys(j), sums
        return attention(task, *operands, calls, fresh)

    def keys(self, j: int) -> Pair:
        return self.kv.piece(Kind.K, j), self.kv.piece(Kind.V, j)

    def parts(self, unit: int, task: Task) -> list[list[Operation]]:
        """Operations of a communication task on one unit, in parts that each end with a transfer;
        the last part is what follows the last transfer. Units with equal operations share them."""
        side = self.side_of[task.kind]
        key = task, side.shared_by(task, unit)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = [[]]
            transfers = side.gather if task.kind == side.gather_kind else side.reduce
            for op in transfers(unit, *task.index):
                if parts[-1] and isinstance(parts[-1][-1], Communication):
                    parts.append([])
                parts[-1].append(op)
        return parts

    def _buffers(self, unit: int) -> dict[str, Buffer]:
        """What a unit gathers, its partial results, and where those of others arrive."""
        made: dict[str, Buffer] = {}
        for side in (self.q, self.kv):
            made |= {} if side.rotates else side.buffers(side.line(unit))
        return made | self.q.stack_buffers(unit) | self.kv.stack_buffers(unit)


class TilePlanner:
    """The parts of a plan that do not depend on how a method moves its blocks."""

    def __init__(self, problem: Problem, num_ranks: int, box: Box) -> None:
        self._problem, self._box = problem, box
        units = num_ranks // box.ulysses
        self.tile = tile_for(box.tile, units, rotation=box.rotation)
        self.backward_tile = self.tile
        if box.backward_tile:
            self.backward_tile = tile_for(box.backward_tile, units, rotation=box.rotation)
        places = {name: getattr(box, name) for name in PLACES}
        self._devices = devices_of(self.tile, box.ulysses, box.ranks_per_node, **places)
        # The order of ranks in the grid does not change the device that holds a token.
        q, kv = (x.on_devices(self._devices) for x in _layouts_of(problem, num_ranks, box))
        self.layouts = q, q if q == kv else kv
        self.shards: Layouts | None = None  # of the caller's tensors, where they differ
        if box.relayout:
            kind = LayoutKind.CONTIGUOUS
            q, kv = (Layout(kind, x.num_tokens, num_ranks, order=x.order) for x in self.layouts)
            self.shards = None if (q, kv) == self.layouts else (q, kv)
        per_node = box.ranks_per_node  # unknown: all ranks count as one node
        firsts = self._devices[:: box.ulysses]  # the first rank of each unit
        self.nodes = tuple(device // per_node if per_node else 0 for device in firsts)

    def lowerings(self, problem: Problem) -> Lowerings:
        """With `one_call` a task has one call, which takes all rows under any mask."""
        rows = (self._problem if self._box.one_call else problem).rows
        return lowerings_of(*self.layouts, rows, one_call=self._box.one_call)

    def tile_passes(
        self,
        direction: Direction,
        cut: PassCut = UNCUT,
        *,
        keep: Keep | None = None,
        rotates: tuple[bool, bool] = (True, True),
    ) -> OnDemand[TilePass]:
        """One pass on each head group. `keep` replaces the option; `rotates`: whether queries, and
        whether keys, go round and are not gathered."""
        problem, box, nodes = self._problem, self._box, self.nodes
        tile = self.tile if direction is Direction.FORWARD else self.backward_tile
        per_node = _members_per_node(tile, nodes)
        # Rows that change their layout are exchanged whole.
        whole = cut.chunks == (1, 1) and len(cut.slices) == 1
        at_once = box.ulysses == 1 or self.shards is not None or whole
        keep = keep or box.keep
        kept = kept_kinds(keep, problem, box.ulysses)
        group = HeadGroup(
            problem, *self.layouts, box.ulysses, 0, self.shards, None if at_once else cut, kept
        )
        tiling = Tiling(
            group,
            direction,
            tile,
            cut,
            _reduce_by(problem, box, tile, nodes),
            box.gather_out,
            per_node,
            rotates,
            keeps_gathered=keep is Keep.GATHERED,
        )

        def on_group(index: int) -> TilePass:
            return TilePass(replace(tiling, head_group=replace(group, index=index)))

        return OnDemand(box.ulysses, on_group)

    def plan(self, problem: Problem, passes: Iterable[Pass]) -> Plan:
        return Plan(
            problem,
            *self.layouts,
            tuple(passes),
            devices=self._devices,
            ranks_per_node=self._box.ranks_per_node,
            method=self._box.method,
            relayout=self.shards is not None,
        )
