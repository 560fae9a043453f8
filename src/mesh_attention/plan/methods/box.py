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

from dataclasses import dataclass, field, replace
from enum import StrEnum

from mesh_attention.errors import PlanError
from mesh_attention.machine.rates import Costs, usual_costs
from mesh_attention.plan.language.buffers import Buffer, Role
from mesh_attention.plan.language.plan import Direction, OnDemand, Pass, Plan
from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.workspace import peak_buffer_bytes
from mesh_attention.plan.methods.parts.assemble import Unit, with_exchanges
from mesh_attention.plan.methods.parts.assignment import Tile, tile_for
from mesh_attention.plan.methods.parts.chunks import HeadSlices, suggested_cut, suggested_ring_cut
from mesh_attention.plan.methods.parts.head_group import PassCut, ulysses_degrees
from mesh_attention.plan.methods.parts.keep import Keep
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
from mesh_attention.plan.methods.parts.tile_plan import SharedOptions, TilePlanner, cut_of, is_cut
from mesh_attention.plan.methods.parts.tile_tasks import CAPPED, Scheduler, order_tasks
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

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


def plan_box(problem: Problem, num_ranks: int, box: Box, directions: Directions) -> Plan:
    """A plan for `num_ranks` ranks. Same arguments, same plan, on every rank."""
    _check_cap(box)
    if box.max_memory_bytes is not None and box.keep in (Keep.AUTO, Keep.GATHERED):
        return _plan_within_cap(problem, num_ranks, box, directions, box.max_memory_bytes)
    return _plan(problem, num_ranks, box, directions)


def _plan(problem: Problem, num_ranks: int, box: Box, directions: Directions) -> Plan:
    units = num_ranks // box.ulysses
    tile = tile_for(box.tile, units, rotation=box.rotation)
    tiles = {Direction.FORWARD: tile, Direction.BACKWARD: tile}
    if box.backward_tile:
        tiles[Direction.BACKWARD] = tile_for(box.backward_tile, units, rotation=box.rotation)
    planner = TilePlanner(problem, num_ranks, box, tile)
    _check_exchange(box, planner)
    is_even = box.ulysses in ulysses_degrees(problem)  # all ranks have the same number of heads
    if is_even and not is_cut(box):
        box = _cut_by_size(problem, num_ranks, box, directions)

    cuts = {
        direction: cut_of(box, direction, problem, box.ulysses)._replace(
            even=box.even_chunks, short_start=box.short_start
        )
        for direction in Direction
    }
    keep = _kept(box, cuts, tiles)
    rotates = (box.rotates is Side.QUERIES, box.rotates is Side.KEYS)

    def build(direction: Direction) -> Pass:
        passes = planner.tile_passes(
            direction, tiles[direction], cuts[direction], keep=keep, rotates=rotates
        )
        order = _order_of(box, passes[0]) if is_even else None

        def builder(index: int) -> BoxBuilder:
            own = order or UnevenOrder(passes[index])
            return BoxBuilder(passes[index], planner.lowerings, box, own)

        return with_exchanges(OnDemand(len(passes), builder))

    return planner.plan(map(build, directions))


def _kept(box: Box, cuts: dict[Direction, PassCut], tiles: dict[Direction, Tile]) -> Keep:
    """What is kept: the backward pass reads rows as the forward pass has cut them."""
    forward, backward = Direction
    if cuts[forward] != cuts[backward] and (box.ulysses > 1 or box.keep is Keep.GATHERED):
        if box.keep not in (Keep.AUTO, Keep.SHARDS):
            raise PlanError(
                f"keep={box.keep}: the backward pass reads the chunks that the forward pass has, "
                "so both must be cut alike; leave 'backward_chunks' and 'backward_head_slices' "
                "out, or say keep=shards"
            )
        return Keep.SHARDS
    if box.keep is Keep.GATHERED and tiles[forward] != tiles[backward]:
        raise PlanError("keep=gathered needs one tile for both passes; leave 'backward_tile' out")
    return box.keep


def _order_of(box: Box, mesh: TilePass) -> Order:
    if box.rotates is Side.KEYS:
        assert box.route is not None, "the gradients of rotating keys are sent step by step"
        return RingOrder(mesh, box.route, box.inner)
    if box.rotates is Side.QUERIES:
        return QueryOrder(mesh, box.route)
    problem = mesh.problem
    if box.one_call and mesh.tile.num_ranks == 1:
        # All rows are in one unit, in one call under any mask: its programs serve any mask.
        problem = replace(problem, mask=Mask())
    cap, by = box.max_memory_bytes, box.scheduler
    schedule = order_tasks(
        mesh, box.costs, by, rows=problem.rows, gamma=box.gamma, max_memory_bytes=cap
    )
    return TileOrder(mesh, schedule, by.value if cap is None else CAPPED)


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
        return [mesh.compute(i, j, calls, fresh)]

    def rotate(self, task: Task) -> list[Operation]:
        raise NotImplementedError("nothing rotates in a tile that is gathered")

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results where a unit has computed none."""
        mesh, (index,) = self._mesh, task.index
        if task.kind == mesh.q_reduce_kind:
            return [] if index in self._begun_q else mesh.q.empty(task.kind, index)
        return [] if index in self._begun_kv else mesh.kv.empty(task.kind, index)


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
                kv_reduce = mesh.kv.reduce_by.value if mesh.kv_reduce_kind else "none"
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
                case mesh.q_reduce_kind | mesh.kv_reduce_kind:  # combine
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


def _plan_within_cap(
    problem: Problem, num_ranks: int, box: Box, directions: Directions, cap: int
) -> Plan:
    """With gathered rows kept, where the memory of all layers has room for them."""
    try:
        uncapped = replace(box, keep=Keep.GATHERED, max_memory_bytes=None)
        program = _plan(problem, num_ranks, uncapped, (Direction.FORWARD,)).forward.programs[0]
        buffers = [buffer for buffer in program.buffers if buffer.role is Role.KEPT]
        kept = box.layers * sum(buffer.num_bytes(problem) for buffer in buffers)
        if kept >= cap:
            raise PlanError(
                f"keep=gathered holds {bytes_text(kept)} in {box.layers} layers, which leaves no "
                f"workspace of max_memory_bytes={cap}; say keep=shards, or allow more"
            )
        capped = replace(box, keep=Keep.GATHERED, max_memory_bytes=cap - kept)
        return _plan(problem, num_ranks, capped, directions)
    except PlanError:
        if box.keep is Keep.GATHERED:
            raise
    return _plan(problem, num_ranks, replace(box, keep=Keep.SHARDS), directions)


def _check_cap(box: Box) -> None:
    cap = box.max_memory_bytes
    if cap is not None and box.scheduler is not Scheduler.GREEDY:
        raise PlanError("max_memory_bytes works with scheduler=greedy only; leave one out")
    if cap is not None and box.ulysses > 1:
        raise PlanError(
            "max_memory_bytes is not supported together with 'ulysses': the tensors exchanged live "
            "through the whole pass, and the cap does not count them; leave one out"
        )


def _check_exchange(box: Box, planner: TilePlanner) -> None:
    """Refuses options that do not suit the way in which tokens are exchanged."""
    at_once = box.ulysses == 1 or planner.shards is not None
    if box.even_chunks and (at_once or not planner.is_zigzag):
        raise PlanError(
            "even_chunks=True is for a zigzag that ranks exchange for heads: it needs "
            "layout=zigzag and 'ulysses' of 2 or more, without relayout=True"
        )
    if box.short_start and at_once:
        raise PlanError(
            "short_start=True is for what ranks exchange for heads: it needs 'ulysses' of 2 or "
            "more, without relayout=True"
        )
    if box.max_memory_bytes is not None and planner.shards is not None:
        raise PlanError(
            "max_memory_bytes is not supported together with relayout=True: the tensors exchanged "
            "live through the whole pass, and the cap does not count them; leave one out, or say "
            "layout=contiguous"
        )


def _cut_by_size(problem: Problem, num_ranks: int, box: Box, directions: Directions) -> Box:
    """The box with the chunks and slices of heads that suit the size of the problem."""
    if box.rotates is Side.QUERIES or (box.rotates is Side.KEYS and box.relayout):
        return box
    if box.rotates is Side.KEYS:
        chunks, heads = suggested_ring_cut(problem, num_ranks, box.ulysses, box.ranks_per_node)
        return replace(box, chunks=chunks, head_slices=heads)
    if box.relayout and num_ranks == box.ulysses:
        return box  # all rows come at once, in any order of computation
    chunks, heads = suggested_cut(problem, num_ranks, box.tile, box.ulysses)
    box = replace(box, chunks=chunks, head_slices=heads)
    if box.max_memory_bytes is None or heads is None:
        return box
    return _within_cap(problem, num_ranks, box, directions, heads, box.max_memory_bytes)


def _within_cap(
    problem: Problem,
    num_ranks: int,
    box: Box,
    directions: Directions,
    heads: HeadSlices,
    max_memory_bytes: int,
) -> Box:
    """The box with smaller slices of heads in each pass, until the workspace keeps to the cap in
    any order. Where even single heads do not, the scheduler must find an order under the cap."""
    sizes = [heads]
    while sizes[-1][1] > 1:
        most = sizes[-1][1] // 2
        sizes.append((max(1, most // 4), most))

    def fits(direction: Direction, slices: HeadSlices) -> bool:
        tried = replace(box, max_memory_bytes=None, head_slices=slices)
        programs = _plan(problem, num_ranks, tried, (direction,)).direction(direction).programs
        return all(peak_buffer_bytes(program, problem) <= max_memory_bytes for program in programs)

    chosen = {d: next((size for size in sizes if fits(d, size)), None) for d in directions}
    if None in chosen.values():
        return replace(box, head_slices=sizes[-1])
    return replace(
        box,
        max_memory_bytes=None,
        head_slices=chosen.get(Direction.FORWARD, heads),
        backward_head_slices=chosen.get(Direction.BACKWARD),
    )
