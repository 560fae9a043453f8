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
box of each method, and `plan_box` makes a plan of it. algorithm.md, sections 2 to 5 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, OnDemand, Pass, Plan
from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.language.workspace import peak_buffer_bytes
from mesh_attention.plan.methods.parts.assemble import HOLD, GroupPass, Unit, with_exchanges
from mesh_attention.plan.methods.parts.chunks import HeadSlices, suggested_cut, suggested_ring_cut
from mesh_attention.plan.methods.parts.head_group import PassCut, ulysses_degrees
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.ring_order import RingOrder
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.methods.parts.tile_order import TileOrder, UnevenOrder
from mesh_attention.plan.methods.parts.tile_plan import (
    Box,
    Side,
    TilePass,
    TilePlanner,
    cut_of,
    layout_kind,
)
from mesh_attention.plan.methods.parts.tile_tasks import CAPPED, GREEDY, order_tasks
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.problem import Problem

Order = TileOrder | UnevenOrder | RingOrder
Directions = tuple[Direction, ...]
_CUTS = ("chunks", "backward_chunks", "head_slices", "backward_head_slices")


def plan_box(problem: Problem, num_ranks: int, box: Box, directions: Directions) -> Plan:
    """A plan for `num_ranks` ranks. Same arguments, same plan, on every rank."""
    if box.ulysses > 1:
        _check_cap(box, "'ulysses'", "leave one out")
    if box.max_memory_bytes is not None and box.keep in (Keep.AUTO, Keep.GATHERED):
        return _plan_within_cap(problem, num_ranks, box, directions, box.max_memory_bytes)
    return _plan(problem, num_ranks, box, directions)


def _plan(problem: Problem, num_ranks: int, box: Box, directions: Directions) -> Plan:
    box = replace(box, layout=layout_kind(problem, box))
    shape = _shape_of(problem.of_any_mask, num_ranks, box)
    if shape.heads is not None and box.max_memory_bytes is not None:
        cap, heads = box.max_memory_bytes, shape.heads
        box = _within_cap(problem, num_ranks, shape.box, directions, heads, cap)
        shape = _shape_of(problem.of_any_mask, num_ranks, box)
    lowerings = shape.planner.lowerings(problem)
    make = _pass_of_masks if box.one_call else _pass_of

    def build(direction: Direction) -> Pass:
        passes = shape.passes[direction]
        order = _order_of(problem, box, passes[0]) if shape.is_even else None
        return make(passes, lowerings, order)

    return shape.planner.plan(problem, map(build, directions))


def _pass_of(passes: Sequence[TilePass], lowerings: Lowerings, order: Order | None) -> Pass:
    """`passes`: on each head group; `order`: None if each has its own."""
    orders = OnDemand(len(passes), lambda index: order or UnevenOrder(passes[index]))
    tiles, first = passes[0], orders[0]
    alone = tiles.tile.num_ranks == 1 and tiles.head_group.cut is None
    made = GroupPass(
        tiles.head_group,
        tiles.direction,
        tiles.needs,
        tiles.groups,
        first.steps,
        first.setting,
        lambda unit, index: _unit(passes[index], lowerings, orders[index], unit),
        hold=HOLD if first.in_parts and not alone else 0,
        keeps_gathered=tiles.keeps_gathered,
    )
    return with_exchanges(made)


@lru_cache(maxsize=16)
def _pass_of_masks(passes: Sequence[TilePass], lowerings: Lowerings, order: Order | None) -> Pass:
    """If each task is one call, the mask decides the order of tasks and nothing else: masks that
    order them alike share the pass, with all programs that were made of it."""
    return replace(_pass_of(passes, lowerings, order), shared=True)


class _Shape(NamedTuple):
    """What a box is before it has a mask. `heads`: slices that were chosen by size."""

    box: Box
    heads: HeadSlices | None
    planner: TilePlanner
    passes: Mapping[Direction, Sequence[TilePass]]
    is_even: bool  # all ranks have the same number of heads


@lru_cache(maxsize=8)  # batches of a training differ in their masks only
def _shape_of(problem: Problem, num_ranks: int, box: Box) -> _Shape:
    planner = TilePlanner(problem, num_ranks, box)
    _check_exchange(box, planner)
    is_even = box.ulysses in ulysses_degrees(problem)
    uncut = is_even and all(getattr(box, name) is None for name in _CUTS)
    if uncut:
        box = _cut_by_size(problem, num_ranks, box)
    cuts = {direction: cut_of(box, direction, problem) for direction in Direction}
    keep = _kept(box, cuts, planner)
    rotates = (box.rotates is Side.QUERIES, box.rotates is Side.KEYS)
    passes = {
        direction: planner.tile_passes(direction, cut, keep=keep, rotates=rotates)
        for direction, cut in cuts.items()
    }
    return _Shape(box, box.head_slices if uncut else None, planner, passes, is_even)


def _kept(box: Box, cuts: dict[Direction, PassCut], planner: TilePlanner) -> Keep:
    """What is kept: the backward pass reads rows as the forward pass has cut them."""
    forward, backward = Direction
    if cuts[forward] != cuts[backward] and (box.ulysses > 1 or box.keep is Keep.GATHERED):
        if box.keep not in (Keep.AUTO, Keep.SHARDS):
            raise PlanError(
                f"keep={box.keep}: the backward pass reads the chunks of the forward pass, "
                "so both need the same cuts; leave 'backward_chunks' and 'backward_head_slices' "
                "out, or say keep=shards"
            )
        return Keep.SHARDS
    if box.keep is Keep.GATHERED and planner.tile != planner.backward_tile:
        raise PlanError("keep=gathered needs one tile for both passes; leave 'backward_tile' out")
    return box.keep


def _order_of(problem: Problem, box: Box, tiles: TilePass) -> Order:
    if box.rotates is not None:
        return _ring_order(tiles, box.rotates is Side.KEYS, box.route, box.inner)
    # If all rows are in one unit, and in one call under any mask, its programs serve any mask.
    serves_any = box.one_call and tiles.tile.num_ranks == 1
    rows, cap = (tiles.problem if serves_any else problem).rows, box.max_memory_bytes
    schedule = order_tasks(tiles, box.costs, rows=rows, gamma=box.gamma, max_memory_bytes=cap)
    return _tile_order(tiles, schedule, GREEDY if cap is None else CAPPED)


# Of all masks, or of those that order tasks alike.
_ring_order, _tile_order = lru_cache(maxsize=16)(RingOrder), lru_cache(maxsize=16)(TileOrder)


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


def _check_cap(box: Box, other: str, way_out: str) -> None:
    if box.max_memory_bytes is not None:
        raise PlanError(
            f"max_memory_bytes is not supported together with {other}: the tensors exchanged live "
            f"through the whole pass, and the cap does not count them; {way_out}"
        )


def _check_exchange(box: Box, planner: TilePlanner) -> None:
    """Refuses options that do not suit the way in which tokens are exchanged."""
    at_once = box.ulysses == 1 or planner.shards is not None
    zigzag = all(layout.kind is LayoutKind.ZIGZAG for layout in planner.layouts)
    if box.even_chunks and (at_once or not zigzag):
        raise PlanError(
            "even_chunks=True is for a zigzag that ranks exchange for heads: it needs "
            "layout=zigzag and 'ulysses' of 2 or more, without relayout=True"
        )
    if box.short_start and at_once:
        raise PlanError(
            "short_start=True is for what ranks exchange for heads: it needs 'ulysses' of 2 or "
            "more, without relayout=True"
        )
    if planner.shards is not None:
        _check_cap(box, "relayout=True", "leave one out, or say layout=contiguous")


def _cut_by_size(problem: Problem, num_ranks: int, box: Box) -> Box:
    """The box with the chunks and slices of heads that suit the size of the problem."""
    if box.rotates is Side.QUERIES or (box.rotates is Side.KEYS and box.relayout):
        return box
    if box.rotates is Side.KEYS:
        chunks, heads = suggested_ring_cut(problem, num_ranks, box.ulysses, box.ranks_per_node)
        return replace(box, chunks=chunks, head_slices=heads)
    if box.relayout and num_ranks == box.ulysses:
        return box  # all rows come at once, in any order of computation
    chunks, heads = suggested_cut(problem, num_ranks, box.tile, box.ulysses)
    return replace(box, chunks=chunks, head_slices=heads)


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


def _unit(tiles: TilePass, lowerings: Lowerings, order: Order, unit: int) -> Unit:
    """All operations of one unit of a head group; `assemble.py` adds exchanges around them."""
    blocks = order.unit(tiles, lowerings, unit)
    operations: list[Operation | Task] = []
    for task in order.tasks:
        match task.kind:
            case "C" | "Q" | "KV" | "sent" | "end":  # attend; a block comes, its results go
                operations += blocks.operations(task)
            case tiles.q.reduce_kind | tiles.kv.reduce_kind:  # combine
                if not task.stage:
                    operations += blocks.empty(task)
                parts = tiles.parts(unit, task.whole)
                for part in [parts[int(task.stage or 0)]] if order.in_parts else parts:
                    operations += part
            case "AG-Q" | "AG-KV":
                operations += tiles.parts(unit, task)[0]
            case _:  # exchange tokens for heads, or back
                operations.append(task)
    return Unit(operations, {**tiles.buffers(unit), **blocks.buffers})
