"""Mesh-Attention as a builder of plans: settings in, programs of all ranks out.

The tile decides who computes what, the chunks decide what can overlap, a scheduler orders the tasks
once for all ranks, and each rank's program is its fragments in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile, best_tile, tiles_of
from mesh_attention.plan.cost import Costs
from mesh_attention.plan.methods.cutting import suggested_cut
from mesh_attention.plan.methods.frame import (
    check_ranks,
    devices_of,
    frame_of,
    layouts_of,
    route_of,
)
from mesh_attention.plan.methods.head_slices import HeadsAtOnce, sizes_for
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_backward import MeshBackward
from mesh_attention.plan.methods.mesh_forward import MeshForward
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.mesh_programs import MeshInner
from mesh_attention.plan.methods.mesh_tasks import CAPPED, Order, order_tasks
from mesh_attention.plan.methods.setting import TileSetting
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.methods.weave import weave
from mesh_attention.plan.peak import Peaks, workspace_sizes
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem

__all__ = ["MAX_TASKS", "MeshSetting", "Scheduler", "plan_mesh"]

MAX_TASKS = 16  # kq * kkv: more chunks than that make calls too small for any kernel

Scheduler = Order


@dataclass(frozen=True, slots=True)
class MeshSetting(TileSetting):
    """Everything a person can choose about a mesh; None means: choose for me.

    tile, chunks          (a, b) and (kq, kkv); the backward ones default to the forward ones
    heads_at_once         KV heads of the first slice and of the largest (`head_slices.py`): slices
                          of the heads follow each other, so that little stays open at both ends,
                          and memory holds a few slices; None: all heads at once
    auto_cut              choose chunks and heads_at_once by the size of the problem
    max_buffer_bytes      cap on the workspace of each pass; the schedule keeps to it or refuses
    """

    backward_tile: tuple[int, int] | None = None
    rotation: bool = True
    chunks: tuple[int, int] = (1, 1)
    backward_chunks: tuple[int, int] | None = None
    heads_at_once: HeadsAtOnce | None = None
    backward_heads_at_once: HeadsAtOnce | None = None
    auto_cut: bool = False
    scheduler: Scheduler = Scheduler.GREEDY
    gamma: float = 1.05
    max_buffer_bytes: int | None = None
    costs: Costs = field(default_factory=Costs)


def plan_mesh(
    problem: Problem,
    num_ranks: int,
    setting: MeshSetting | None = None,
    *,
    directions: tuple[Direction, ...] = (Direction.FORWARD, Direction.BACKWARD),
    degree: int = 1,
    method: str = "mesh",
) -> Plan:
    """A plan for `num_ranks` ranks. Same arguments, same plan, on every rank.

    `degree` is that of Ulysses: the tile is then one of units of so many ranks.
    """
    setting = setting or MeshSetting()
    if setting.max_buffer_bytes is not None and setting.scheduler is not Scheduler.GREEDY:
        raise PlanError("max_buffer_bytes works with the greedy scheduler only; leave one out")
    if setting.max_buffer_bytes is not None and degree > 1:
        raise PlanError(
            "max_buffer_bytes is not supported together with ulysses: the swapped tensors live "
            "through the whole pass, and the cap does not count them; leave one out"
        )
    check_ranks(num_ranks, setting.ranks_per_node)
    units = num_ranks // degree
    tile = _tile(setting.tile or best_tile(units, problem), units, setting.rotation)
    backward_tile = (
        _tile(setting.backward_tile, units, setting.rotation) if setting.backward_tile else tile
    )
    frame = frame_of(method, setting, ulysses=degree)
    devices = devices_of(tile, frame)
    if setting.auto_cut:
        _refuse_given_cut(setting)
        chunks, heads = suggested_cut(problem, num_ranks, (tile.a, tile.b), degree)
        setting = replace(setting, auto_cut=False, chunks=chunks, heads_at_once=heads)
        if setting.max_buffer_bytes is not None and heads is not None:
            setting = _within_cap(problem, num_ranks, setting, directions, method)
    q_layout, kv_layout = layouts_of(problem, num_ranks, frame)
    lowerings = Lowerings(q_layout, kv_layout, problem.rows)

    def build(direction: Direction) -> Pass:
        forward = direction is Direction.FORWARD
        shape = tile if forward else backward_tile
        chunks = setting.chunks if forward else setting.backward_chunks or setting.chunks
        own = not forward and setting.backward_heads_at_once is not None
        name = "backward_heads_at_once" if own else "heads_at_once"
        _check_chunks(chunks)
        slices = sizes_for(problem, degree, getattr(setting, name), name)
        route = route_of(frame, shape, devices)

        def on(strand: Strand) -> MeshPass:
            if forward:
                return MeshForward(strand, shape, chunks, route, slices=slices)
            out = setting.gather_out
            return MeshBackward(strand, shape, chunks, route, gather_out=out, slices=slices)

        passes = [on(Strand(problem, q_layout, kv_layout, degree, i)) for i in range(degree)]
        schedule = order_tasks(
            passes[0],
            setting.costs,
            setting.scheduler,
            gamma=setting.gamma,
            max_buffer_bytes=setting.max_buffer_bytes,
        )
        ordered_by = CAPPED if setting.max_buffer_bytes is not None else setting.scheduler.value
        return weave([MeshInner(one, schedule, lowerings, ordered_by) for one in passes])

    return Plan(
        problem,
        q_layout,
        kv_layout,
        tuple(build(direction) for direction in directions),
        devices=devices,
        ranks_per_node=setting.ranks_per_node,
        method=method,
    )


def _refuse_given_cut(setting: MeshSetting) -> None:
    names = ("chunks", "backward_chunks", "heads_at_once", "backward_heads_at_once")
    for name in names:
        if getattr(setting, name) not in (None, (1, 1)):
            raise PlanError(f"auto_cut chooses {', '.join(names)}: give either it or {name}")


def _within_cap(
    problem: Problem,
    num_ranks: int,
    setting: MeshSetting,
    directions: tuple[Direction, ...],
    method: str,
) -> MeshSetting:
    """Smaller slices of heads in each pass, until its workspace keeps to the cap by itself; where
    even single heads do not, an order under the cap has to be found for them."""
    cap, heads = setting.max_buffer_bytes, setting.heads_at_once
    assert cap is not None
    assert heads is not None
    sizes = [heads]
    while sizes[-1][1] > 1:
        most = sizes[-1][1] // 2
        sizes.append((max(1, most // 4), most))

    def fits(direction: Direction, at_once: HeadsAtOnce) -> bool:
        tried = replace(setting, max_buffer_bytes=None, heads_at_once=at_once)
        plan = plan_mesh(problem, num_ranks, tried, directions=(direction,), method=method)
        programs = plan.direction(direction).programs
        return all(Peaks(workspace_sizes(p, problem)).of(p) <= cap for p in programs)

    chosen = {d: next((size for size in sizes if fits(d, size)), None) for d in directions}
    if None in chosen.values():
        return replace(setting, heads_at_once=sizes[-1])
    return replace(
        setting,
        max_buffer_bytes=None,
        heads_at_once=chosen.get(Direction.FORWARD, heads),
        backward_heads_at_once=chosen.get(Direction.BACKWARD),
    )


def _tile(shape: tuple[int, int], units: int, rotation: bool) -> Tile:
    tile = Tile(*shape, rotation)
    if tile.num_ranks != units:
        raise PlanError(
            f"tile {tile} has {tile.num_ranks} cells but there are {units} ranks; "
            f"tiles that fit: {tiles_of(units)}"
        )
    return tile


def _check_chunks(chunks: tuple[int, int]) -> None:
    kq, kkv = chunks
    if kq < 1 or kkv < 1 or kq * kkv > MAX_TASKS:
        raise PlanError(
            f"chunks {kq}x{kkv}: both must be at least 1 and their product at most {MAX_TASKS}"
        )
