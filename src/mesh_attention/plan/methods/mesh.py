"""Mesh-Attention as a builder of plans: settings in, programs of all ranks out.

The tile decides who computes what, the chunks decide what can overlap, a scheduler orders the tasks
once for all ranks, and each rank's program is its fragments in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile, best_tile, patch_devices, tiles_of
from mesh_attention.plan.cost import Costs
from mesh_attention.plan.home import Combine, Route
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.methods.mesh_backward import MeshBackward
from mesh_attention.plan.methods.mesh_forward import MeshForward
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.mesh_programs import Lowerings, Order, build_pass
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem

__all__ = ["MAX_TASKS", "MeshSetting", "Scheduler", "plan_mesh"]

MAX_TASKS = 16  # kq * kkv: more chunks than that make calls too small for any kernel

Scheduler = Order


@dataclass(frozen=True, slots=True)
class MeshSetting:
    """Everything a person can choose about a mesh; None means: choose for me.

    tile, chunks          (a, b) and (kq, kkv); the backward ones default to the forward ones
    gather_out            backward gathers O as the paper does, instead of delta
    combine               how partial results come home
    alpha                 a node is an alpha-wide patch of the tile grid (needs ranks_per_node)
    max_buffer_bytes      cap on the workspace of each pass; the schedule keeps to it or refuses
    """

    tile: tuple[int, int] | None = None
    backward_tile: tuple[int, int] | None = None
    rotation: bool = True
    chunks: tuple[int, int] = (1, 1)
    backward_chunks: tuple[int, int] | None = None
    layout: LayoutKind | None = None
    stripe_block: int = 1
    combine: Combine = Combine.AUTO
    gather_out: bool = False
    ranks_per_node: int | None = None
    alpha: int | None = None
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
) -> Plan:
    """A plan for `num_ranks` ranks. Same arguments, same plan, on every rank."""
    setting = setting or MeshSetting()
    if setting.max_buffer_bytes is not None and setting.scheduler is not Scheduler.GREEDY:
        raise PlanError("max_buffer_bytes works with the greedy scheduler only; leave one out")
    tile = _tile(setting.tile or best_tile(num_ranks, problem), num_ranks, setting.rotation)
    backward_tile = (
        _tile(setting.backward_tile, num_ranks, setting.rotation) if setting.backward_tile else tile
    )
    devices = _devices(tile, setting)
    kind = setting.layout
    if kind is None:
        kind = LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG
    q_layout, kv_layout = (
        Layout(kind, tokens, num_ranks, setting.stripe_block)
        for tokens in (problem.q_tokens, problem.keys)
    )
    lowerings = Lowerings(q_layout, kv_layout, problem.rows)

    def build(direction: Direction) -> MeshPass:
        forward = direction is Direction.FORWARD
        shape = tile if forward else backward_tile
        chunks = setting.chunks if forward else setting.backward_chunks or setting.chunks
        _check_chunks(chunks)
        route = _route(setting, shape, devices)
        if forward:
            return MeshForward(problem, q_layout, kv_layout, shape, chunks, route)
        return MeshBackward(
            problem, q_layout, kv_layout, shape, chunks, route, gather_out=setting.gather_out
        )

    return Plan(
        problem,
        q_layout,
        kv_layout,
        tuple(
            build_pass(
                build(direction),
                lowerings,
                setting.costs,
                setting.scheduler,
                gamma=setting.gamma,
                max_buffer_bytes=setting.max_buffer_bytes,
            )
            for direction in directions
        ),
        devices=devices,
        ranks_per_node=setting.ranks_per_node,
        method="mesh",
    )


def _tile(shape: tuple[int, int], num_ranks: int, rotation: bool) -> Tile:
    if num_ranks < 1:
        raise PlanError(f"ranks={num_ranks}: must be at least 1")
    tile = Tile(*shape, rotation)
    if tile.num_ranks != num_ranks:
        raise PlanError(
            f"tile {tile} has {tile.num_ranks} cells but there are {num_ranks} ranks; "
            f"tiles that fit: {tiles_of(num_ranks)}"
        )
    return tile


def _check_chunks(chunks: tuple[int, int]) -> None:
    kq, kkv = chunks
    if kq < 1 or kkv < 1 or kq * kkv > MAX_TASKS:
        raise PlanError(
            f"chunks {kq}x{kkv}: both must be at least 1 and their product at most {MAX_TASKS}"
        )


def _devices(tile: Tile, setting: MeshSetting) -> tuple[int, ...]:
    p = setting.ranks_per_node
    if setting.alpha is None:
        if p is not None and p < 1:
            raise PlanError(f"ranks_per_node={p}: must be at least 1")
        return tuple(range(tile.num_ranks))
    if p is None:
        raise PlanError("alpha needs ranks_per_node: it is the width of a node's patch of tiles")
    if p < 1 or setting.alpha < 1:
        raise PlanError(f"ranks_per_node={p} and alpha={setting.alpha} must be at least 1")
    return patch_devices(tile.a, tile.b, p, setting.alpha)


def _route(setting: MeshSetting, tile: Tile, devices: tuple[int, ...]) -> Route:
    """Auto: partials that a reduce-scatter would add inside a node should not each leave it."""
    if setting.combine is not Combine.AUTO:
        return Route(setting.combine.value)
    p = setting.ranks_per_node
    if p is None:
        return Route.EXCHANGE
    groups = [tile.q_group(r) for r in range(tile.b)]
    inside = all(len({devices[g] // p for g in group}) == 1 for group in groups)
    return Route.EXCHANGE if inside else Route.REDUCE_SCATTER
