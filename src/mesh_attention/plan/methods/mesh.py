"""Mesh-Attention and what is a mesh of another shape: all-gather KV, and Mesh-USP.

The tile decides who computes what, the chunks and slices of heads decide what can overlap, a
scheduler orders the tasks once for all ranks, and each rank's program is its fragments in that
order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mesh_attention.cost.machine.rates import Costs, usual_costs
from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import best_tile
from mesh_attention.plan.build.exchange import with_exchanges
from mesh_attention.plan.build.head_group import chosen_degree
from mesh_attention.plan.build.setting import (
    CombineSetting,
    CutSetting,
    DegreeSetting,
    TileSetting,
    option,
)
from mesh_attention.plan.build.slices import HeadSlices, suggested_cut
from mesh_attention.plan.build.tile_builder import MeshBuilder
from mesh_attention.plan.build.tile_plan import (
    MAX_TASKS as MAX_TASKS,
)
from mesh_attention.plan.build.tile_plan import (
    TilePlanner,
    cut_of,
    is_cut,
    shared_options,
    tile_for,
)
from mesh_attention.plan.build.tile_tasks import CAPPED, Scheduler, order_tasks
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction, OnDemand, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.workspace import peak_buffer_bytes

Directions = tuple[Direction, ...]
BOTH = (Direction.FORWARD, Direction.BACKWARD)


@dataclass(frozen=True)
class MeshSetting(TileSetting, CutSetting):
    """2-D tiles of the query-key matrix."""

    backward_tile: tuple[int, int] | None = option(
        None, "the tile of the backward pass, if another", "AxB"
    )
    rotation: bool = option(True, "KV partition rotation; without it KV comes by all-to-all")
    costs: Costs = option(
        usual_costs(), "bandwidth, speed and latency that the scheduler reckons with", ""
    )


@dataclass(frozen=True)
class AllGatherKvSetting(CombineSetting, CutSetting):
    """Every rank gathers all KV, as Llama 3 training did: the mesh with a = 1."""


@dataclass(frozen=True)
class MeshUspSetting(MeshSetting, DegreeSetting):
    """As the mesh, on units of `ulysses` ranks."""

    even_chunks: bool = option(
        False,
        "chunks of rows have as much of both halves of a zigzag, from its two ends: under a causal "
        "mask each is as much work on every rank, and ranks do not wait for each other",
    )
    short_start: bool = option(
        False,
        "the first chunk of keys, where they are in chunks, is cut at a quarter of it: exchanges "
        "are in flight for less time before there is something to compute",
    )


def plan_mesh(
    problem: Problem,
    num_ranks: int,
    setting: MeshSetting | None = None,
    directions: Directions = BOTH,
    *,
    degree: int = 1,
    units_per_node: int | None = None,
    even_chunks: bool = False,
    short_start: bool = False,
    method: str = "mesh",
) -> Plan:
    """A plan for `num_ranks` ranks. Same arguments, same plan, on every rank.

    `degree` is that of Ulysses: the tile is then one of units of so many ranks, of which
    `units_per_node` have ranks in a node, where that is said. `even_chunks` and `short_start`: of
    what they exchange.
    """
    setting = setting or MeshSetting()
    cap = setting.max_memory_bytes
    if cap is not None and setting.scheduler is not Scheduler.GREEDY:
        raise PlanError("max_memory_bytes works with scheduler=greedy only; leave one out")
    if cap is not None and degree > 1:
        raise PlanError(
            "max_memory_bytes is not supported together with 'ulysses': the tensors exchanged live "
            "through the whole pass, and the cap does not count them; leave one out"
        )
    units = num_ranks // degree
    tile = tile_for(setting.tile or best_tile(units, problem), units, rotation=setting.rotation)
    shapes = {Direction.FORWARD: tile, Direction.BACKWARD: tile}
    if setting.backward_tile:
        backward = tile_for(setting.backward_tile, units, rotation=setting.rotation)
        shapes[Direction.BACKWARD] = backward
    all_at_once = units == 1 and setting.relayout  # whatever is computed first
    if not is_cut(setting) and not all_at_once:
        chunks, heads = suggested_cut(problem, num_ranks, (tile.a, tile.b), degree)
        setting = replace(setting, chunks=chunks, head_slices=heads)
        if cap is not None and heads is not None:
            setting = _within_cap(problem, num_ranks, setting, directions, method)
    shared = shared_options(method, setting, ulysses=degree)
    shared = replace(shared, units_per_node=units_per_node)
    planner = TilePlanner(problem, num_ranks, shared, tile)
    if even_chunks and (degree == 1 or planner.shards is not None or not planner.is_zigzag):
        raise PlanError(
            "even_chunks=True is for a zigzag that ranks exchange for heads: it needs "
            "layout=zigzag and 'ulysses' of 2 or more, without relayout=True"
        )
    if short_start and (degree == 1 or planner.shards is not None):
        raise PlanError(
            "short_start=True is for what ranks exchange for heads: it needs 'ulysses' of 2 or "
            "more, without relayout=True"
        )
    if cap is not None and planner.shards is not None:
        raise PlanError(
            "max_memory_bytes is not supported together with relayout=True: the tensors exchanged "
            "live through the whole pass, and the cap does not count them; leave one out, or say "
            "layout=contiguous"
        )

    # All rows in one unit, and one call whatever is seen of them: such programs serve any mask.
    seen = replace(problem, mask=Mask()) if setting.one_call and units == 1 else problem

    def build(direction: Direction) -> Pass:
        cut = cut_of(setting, direction, problem, degree)
        cut = cut._replace(even=even_chunks, short_start=short_start)
        passes = planner.tile_passes(direction, shapes[direction], *cut)
        schedule = order_tasks(
            passes[0],
            setting.costs,
            setting.scheduler,
            rows=seen.rows,
            gamma=setting.gamma,
            max_memory_bytes=setting.max_memory_bytes,
        )
        capped = setting.max_memory_bytes is not None
        ordered_by = CAPPED if capped else setting.scheduler.value
        return with_exchanges(
            OnDemand(
                len(passes),
                lambda index: MeshBuilder(passes[index], schedule, planner.lowerings, ordered_by),
            )
        )

    return planner.plan(map(build, directions))


def plan_all_gather_kv(
    problem: Problem, ranks: int, setting: AllGatherKvSetting, directions: Directions
) -> Plan:
    mesh = MeshSetting(tile=(1, ranks), **_given(setting))
    return plan_mesh(problem, ranks, mesh, directions, method="allgather-kv")


def plan_mesh_usp(
    problem: Problem, ranks: int, setting: MeshUspSetting, directions: Directions
) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses, setting.ranks_per_node)
    names = {one.name for one in fields(MeshSetting)}
    mesh = MeshSetting(**{k: v for k, v in _given(setting).items() if k in names})
    return plan_mesh(
        *(problem, ranks, mesh, directions),
        degree=degree,
        units_per_node=setting.units_per_node,
        even_chunks=setting.even_chunks,
        short_start=setting.short_start,
        method="mesh-usp",
    )


def _given(setting: CutSetting) -> dict[str, Any]:
    return {one.name: getattr(setting, one.name) for one in fields(setting)}


def _within_cap(
    problem: Problem, num_ranks: int, setting: MeshSetting, directions: Directions, method: str
) -> MeshSetting:
    """Smaller slices of heads in each pass, until its workspace keeps to the cap by itself; where
    even single heads do not, an order under the cap has to be found for them."""
    cap, heads = setting.max_memory_bytes, setting.head_slices
    assert cap is not None
    assert heads is not None
    sizes = [heads]
    while sizes[-1][1] > 1:
        most = sizes[-1][1] // 2
        sizes.append((max(1, most // 4), most))

    def fits(direction: Direction, slices: HeadSlices) -> bool:
        tried = replace(setting, max_memory_bytes=None, head_slices=slices)
        plan = plan_mesh(problem, num_ranks, tried, (direction,), method=method)
        programs = plan.direction(direction).programs
        return all(peak_buffer_bytes(program, problem) <= cap for program in programs)

    chosen = {d: next((size for size in sizes if fits(d, size)), None) for d in directions}
    if None in chosen.values():
        return replace(setting, head_slices=sizes[-1])
    return replace(
        setting,
        max_memory_bytes=None,
        head_slices=chosen.get(Direction.FORWARD, heads),
        backward_head_slices=chosen.get(Direction.BACKWARD),
    )
