"""The frame that methods on a tile grid share: layouts, devices, strands, and the plan itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile, patch_devices
from mesh_attention.plan.home import Combine, Route
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_backward import MeshBackward
from mesh_attention.plan.methods.mesh_forward import MeshForward
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.setting import Setting
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.methods.weave import Inner, weave
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem

__all__ = ["Frame", "check_ranks", "devices_of", "frame_of", "layouts_of", "plan_by", "route_of"]


@dataclass(frozen=True, slots=True)
class Frame(Setting):
    """What does not depend on how a method moves its blocks."""

    method: str = ""
    combine: Combine = Combine.AUTO
    alpha: int | None = None
    ulysses: int = 1


def frame_of(method: str, setting: Setting, *, ulysses: int | None = None) -> Frame:
    """What a setting says about the frame, by the names they share; the degree, where given, is
    the one that was chosen."""
    shared = {field.name for field in fields(Frame)}
    given = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name in shared}
    if ulysses is not None:
        given["ulysses"] = ulysses
    return Frame(**given, method=method)


def check_ranks(num_ranks: int, ranks_per_node: int | None) -> None:
    if num_ranks < 1:
        raise PlanError(f"ranks={num_ranks}: must be at least 1")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanError(f"ranks_per_node={ranks_per_node}: must be at least 1")


def layouts_of(problem: Problem, num_ranks: int, frame: Frame) -> tuple[Layout, Layout]:
    kind = frame.layout
    if kind is None:
        kind = LayoutKind.CONTIGUOUS if problem.mask.is_full else LayoutKind.ZIGZAG
    q, kv = (
        Layout(kind, tokens, num_ranks, frame.stripe_block)
        for tokens in (problem.q_tokens, problem.keys)
    )
    return q, kv


def devices_of(tile: Tile, frame: Frame) -> tuple[int, ...]:
    """The physical rank of each logical one: in order, or by patches of the tile grid."""
    p, degree = frame.ranks_per_node, frame.ulysses
    if frame.alpha is None:
        return tuple(range(tile.num_ranks * degree))
    if p is None:
        raise PlanError("alpha needs ranks_per_node: it is the width of a node's patch of tiles")
    if frame.alpha < 1:
        raise PlanError(f"alpha={frame.alpha}: must be at least 1")
    if p % degree:
        raise PlanError(
            f"alpha with Ulysses degree {degree} needs whole units in a node of {p} ranks; "
            "leave alpha out"
        )
    units = patch_devices(tile.a, tile.b, p // degree, frame.alpha)
    return tuple(unit * degree + i for unit in units for i in range(degree))


def route_of(frame: Frame, tile: Tile, devices: tuple[int, ...]) -> Route:
    """Auto: partials that a reduce-scatter would add inside a node should not each leave it."""
    if frame.combine is not Combine.AUTO:
        return Route(frame.combine.value)
    p = frame.ranks_per_node
    if p is None:
        return Route.EXCHANGE
    groups = [tile.q_group(r) for r in range(tile.b)]
    inside = all(len({devices[g * frame.ulysses] // p for g in group}) == 1 for group in groups)
    return Route.EXCHANGE if inside else Route.REDUCE_SCATTER


def plan_by(
    problem: Problem,
    num_ranks: int,
    frame: Frame,
    tile: Tile,
    directions: tuple[Direction, ...],
    inner: Callable[[MeshPass, Lowerings], Inner],
) -> Plan:
    """A plan whose strands are made by `inner` from a mesh pass that is not chunked."""
    check_ranks(num_ranks, frame.ranks_per_node)
    q_layout, kv_layout = layouts_of(problem, num_ranks, frame)
    lowerings = Lowerings(q_layout, kv_layout, problem.rows)
    devices = devices_of(tile, frame)
    route = route_of(frame, tile, devices)

    def on(strand: Strand, direction: Direction) -> MeshPass:
        if direction is Direction.FORWARD:
            return MeshForward(strand, tile, (1, 1), route)
        return MeshBackward(strand, tile, (1, 1), route, gather_out=frame.gather_out)

    strands = [
        Strand(problem, q_layout, kv_layout, frame.ulysses, index) for index in range(frame.ulysses)
    ]
    return Plan(
        problem,
        q_layout,
        kv_layout,
        tuple(
            weave([inner(on(strand, direction), lowerings) for strand in strands])
            for direction in directions
        ),
        devices=devices,
        ranks_per_node=frame.ranks_per_node,
        method=frame.method,
    )
