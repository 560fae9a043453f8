"""The box: heads by queries by keys. Most methods are boxes, and this is their one builder.

    units      U consecutive ranks are a unit; they exchange tokens for heads, and each of them has
               all tokens of the unit for a share of the heads (`head_group.py`)
    tile       a x b units of queries and of keys: the part of the query-key matrix that a unit
               computes, in a row of a units that share queries and a column of b that share keys
    each side  is gathered, all at once or chunk by chunk, or rotated: block after block goes round
    attend     a unit attends from the queries that it has to the keys that it has
    combine    partial results reach the owners of their rows: those of queries in the row, those of
               keys in the column; at the end, or step by step with the rotation
    back       heads are exchanged for tokens

Without Ulysses a unit is a rank. Ring-Attention is a tile 1 x n whose keys rotate, all-gather KV
one whose keys are gathered, Ulysses a tile 1 x 1; the mesh is any other. `box_methods.py` says the
box of each method. algorithm.md, sections 2 to 5 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.methods.parts.assemble import Unit
from mesh_attention.plan.methods.parts.key_ring import KeyRings
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.query_ring import QueryRing
from mesh_attention.plan.methods.parts.rotate import GradientRoute
from mesh_attention.plan.methods.parts.setting import CutSetting
from mesh_attention.plan.methods.parts.task_orders import (
    QueryOrder,
    RingOrder,
    TileOrder,
    UnevenOrder,
)
from mesh_attention.plan.methods.parts.tile_pass import TilePass
from mesh_attention.plan.methods.parts.tile_plan import SharedOptions

Directions = tuple[Direction, ...]
Order = TileOrder | UnevenOrder | RingOrder | QueryOrder
# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1


class Side(StrEnum):
    QUERIES = "queries"
    KEYS = "keys"


@dataclass(frozen=True)
class Box(SharedOptions, CutSetting):
    """Other fields are the options of these names.

    rotates    the side that goes round in blocks; the other side, or both, are gathered
    route      how results of rotating blocks reach their owners; None: all at the end
    inner      units of an inner ring, in a ring of rings
    rotation   KV partition rotation: without it keys come by all-to-all
    """

    tile: tuple[int, int] = (1, 1)
    backward_tile: tuple[int, int] | None = None
    rotates: Side | None = None
    route: GradientRoute | None = GradientRoute.DIRECT
    inner: int | None = None
    rotation: bool = True
    even_chunks: bool = False
    short_start: bool = False
    costs: Costs = field(default_factory=usual_costs)


class TileBlocks:
    """The attentions of a unit that gathers: every Q chunk with every KV chunk."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, unit: int) -> None:
        self._mesh, self._lowerings = mesh, lowerings
        self._row, self._column = mesh.tile.row(unit), mesh.tile.column(unit)
        self._begun_q, self._begun_kv = set[int](), set[int]()  # chunks whose sums hold something
        self.buffers: dict[str, Buffer] = {}

    def attend(self, task: Task) -> list[Operation]:
        mesh, lowerings, (i, j) = self._mesh, self._lowerings, task.index
        queries = lowerings.queries(mesh.q.spans(self._row, i))
        calls = lowerings.calls(queries, lowerings.keys(mesh.kv.spans(self._column, j)))
        if not calls:
            return []
        fresh = (i not in self._begun_q, j not in self._begun_kv)
        self._begun_q.add(i)
        self._begun_kv.add(j)
        return [mesh.attend(task, calls, fresh)]

    def rotate(self, task: Task) -> list[Operation]:
        raise NotImplementedError("nothing rotates in a tile that is gathered")

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results where a unit has computed none."""
        mesh, (index,) = self._mesh, task.index
        if task.kind == mesh.q.reduce_kind:
            return [] if index in self._begun_q else mesh.q.empty(index)
        return [] if index in self._begun_kv else mesh.kv.empty(index)


class BoxBuilder:
    """A box on one head group: a `UnitBuilder`."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, box: Box, order: Order) -> None:
        self._mesh, self._lowerings, self._box, self._order = mesh, lowerings, box, order
        self.head_group, self.direction, self.needs = mesh.head_group, mesh.direction, mesh.needs
        self.schedule = Schedule(order.steps)
        alone = mesh.tile.num_ranks == 1 and mesh.head_group.cut is None
        self.hold = HOLD if order.in_parts and not alone else 0
        self.groups = mesh.groups
        self.keeps_gathered = mesh.keeps_gathered

    @property
    def setting(self) -> dict[str, str]:
        box, mesh = self._box, self._mesh
        shape, q_reduce = {"tile": str(mesh.tile)}, mesh.q.reduce_by.value
        match self._order:
            case UnevenOrder():
                heads, ranks = mesh.problem.num_heads, box.ulysses
                most = -(-heads // ranks)
                work = f"work max/mean {most * ranks / heads:.3f}"
                return {"heads": f"at most {most} a rank, {work}"}
            case QueryOrder():
                by = "all-to-all" if box.route is None else box.route.value
                return {**shape, "q": "ring", "q_reduce": by}
            case RingOrder(gradients=gradients):
                words = {**shape, "kv": f"rings of {box.inner}" if box.inner else "ring"}
                if len(mesh.q.chunks) + len(mesh.kv.chunks) > 2:
                    words |= mesh.cut_setting
                if mesh.tile.a > 1:
                    words["q_reduce"] = q_reduce
                if mesh.direction is Direction.BACKWARD:
                    words["gradients"] = gradients.value
                return words
            case TileOrder(ordered_by=ordered_by):
                kv_reduce = mesh.kv.reduce_by.value if mesh.kv.reduce_kind else "none"
                ways = {"q_reduce": q_reduce, "kv_reduce": kv_reduce, "scheduler": ordered_by}
                rotation = "on" if mesh.tile.rotation else "off"
                return {**shape, "rotation": rotation, **mesh.cut_setting, **ways}

    def _blocks(self, unit: int) -> TileBlocks | KeyRings | QueryRing:
        match self._order:
            case RingOrder():
                return KeyRings(self._mesh, self._lowerings, unit, self._order)
            case QueryOrder():
                return QueryRing(self._mesh, self._lowerings, unit, self._order)
            case _:
                return TileBlocks(self._mesh, self._lowerings, unit)

    def unit(self, unit: int) -> Unit:
        """All operations of one unit; exchanges around it are added by `assemble.py`."""
        mesh, blocks = self._mesh, self._blocks(unit)
        operations: list[Operation | Task] = []
        for task in self._order.tasks:
            match task.kind:
                case "AG-Q" | "AG-KV":
                    operations += mesh.parts(unit, task)[0]
                case "Q" | "KV" | "sent" | "end":  # rotate: a block comes, its results go
                    operations += blocks.rotate(task)
                case "C":
                    operations += blocks.attend(task)
                case mesh.q.reduce_kind | mesh.kv.reduce_kind:  # combine
                    if not task.stage:
                        operations += blocks.empty(task)
                    parts = mesh.parts(unit, task.whole)
                    if self._order.in_parts:
                        parts = [parts[int(task.stage or 0)]]
                    for part in parts:
                        operations += part
                case _:  # exchange tokens for heads, or back
                    operations.append(task)
        buffers: dict[str, Buffer] = {}
        if self._box.rotates is not Side.QUERIES:
            buffers |= mesh.q.buffers(mesh.tile.row(unit))
        if self._box.rotates is not Side.KEYS:
            buffers |= mesh.kv.buffers(mesh.tile.column(unit))
        return Unit(operations, {**buffers, **mesh.stack_buffers(unit), **blocks.buffers})
