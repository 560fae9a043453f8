"""Methods whose keys rotate: ring, double ring, AGQ-RingKV; and Ulysses and USP around a ring.

The Q side is that of a tile (a team of `a` gathers its Q and reduces its outputs); the KV side is a
`KeyRing` through the KV group. Tile 1 x n is Ring-Attention. Ulysses is a ring of one unit, which
has all tokens of its heads and nothing left to fetch (`ulysses.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import factorisations
from mesh_attention.plan.buffers import Kind
from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.head_group import PassCut, chosen_degree
from mesh_attention.plan.build.key_ring import KeyRing
from mesh_attention.plan.build.ring_order import RingOrder
from mesh_attention.plan.build.rotate import Reach, double_ring, members_per_node, ring
from mesh_attention.plan.build.setting import (
    ChunkSetting,
    DegreeSetting,
    RotationSetting,
    TileSetting,
    option,
)
from mesh_attention.plan.build.slices import suggested_ring_cut
from mesh_attention.plan.build.tile_builder import TileBuilder
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.build.tile_plan import (
    SharedOptions,
    cut_of,
    is_cut,
    plan_by,
    shared_options,
    squarest,
    tile_for,
)
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Operation, Task
from mesh_attention.plan.schedule.tasks import Schedule

Directions = tuple[Direction, ...]


@dataclass(frozen=True)
class RingSetting(RotationSetting, ChunkSetting):
    """Keys rotate in one ring."""


@dataclass(frozen=True)
class DoubleRingSetting(DegreeSetting, ChunkSetting):
    """Rings of `inner` ranks, and one ring of such rings."""

    inner: int | None = option(
        None, "ranks of an inner ring: divides the ranks (the units); left out: those of a node"
    )


@dataclass(frozen=True)
class AgqRingKvSetting(TileSetting, RotationSetting):
    """A mesh whose Q is gathered and whose KV rotates inside the KV group."""


@dataclass(frozen=True)
class UspSetting(RotationSetting, DegreeSetting, ChunkSetting):
    """Ulysses inside, a ring outside."""


class KeyRingBuilder(TileBuilder):
    """Units whose keys rotate in the KV group."""

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        gradients: Reach,
        inner: int | None,
        nodes: tuple[int, ...],
    ) -> None:
        super().__init__(mesh)
        self._per_node: int | None = None
        if gradients is Reach.DIRECT and inner is None:
            columns = range(mesh.tile.a)
            self._per_node = members_per_node(map(mesh.tile.kv_group, columns), nodes)
        self._lowerings = lowerings
        self._gradients = gradients
        self._inner = inner
        self._order = RingOrder(mesh, self._per_node)
        self._shared: dict[object, list[Operation]] = {}

    @property
    def setting(self) -> dict[str, str]:
        setting = {"tile": str(self._mesh.tile), "kv": "ring"}
        if self._inner:
            setting["kv"] = f"rings of {self._inner}"
        if len(self._mesh.q.chunks) + len(self._mesh.kv.chunks) > 2:
            setting |= self._mesh.cut_setting
        if self._mesh.tile.a > 1:
            setting["q_reduce"] = self._mesh.q.reduce_by.value
        if self.direction is Direction.BACKWARD:
            setting["gradients"] = self._gradients.value
        return setting

    @property
    def schedule(self) -> Schedule:
        return Schedule(self._order.steps)

    def unit(self, unit: int) -> Unit:
        mesh, order = self._mesh, self._order
        row, begun = mesh.tile.row(unit), set[int]()
        rings = [self._ring(unit, part, begun) for part in range(len(mesh.kv.chunks))]
        operations: list[Operation | Task] = []
        if mesh.tile.a > 1:
            operations.append(mesh.gather_q(row, 0))
        for task in order.tasks:
            part, step = divmod(task.index[-1], order.size)
            match task.kind:
                case "KV":
                    operations += rings[part].hop(step)
                case "C":
                    operations += rings[part].attention(task.index[0], step)
                case order.SENT:
                    operations += rings[part].send_on(step)
                case order.END:
                    operations += rings[part].end()
                case mesh.q_reduce_kind:
                    (index,) = task.index
                    operations += rings[order.last_part(index)].empty(index)
                    operations += mesh.reduce_q(index, mesh.q.reduction(unit, index))
                case _:
                    operations.append(task)  # an exchange
        buffers = {**mesh.q.buffers(row), **mesh.stack_buffers(unit)}
        for one in rings:
            buffers |= one.buffers
        return Unit(operations, buffers)

    def _ring(self, unit: int, part: int, begun: set[int]) -> KeyRing:
        """That of a KV chunk."""
        mesh, local = self._mesh, self.head_group.local
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        members, chunk = mesh.tile.kv_group(column), mesh.kv.chunks[part]
        place = members.index(unit), len(members)
        return KeyRing(
            mesh,
            self._lowerings,
            row,
            self.head_group.group_name(f"KV{column}"),
            double_ring(*place, self._inner) if self._inner else ring(*place),
            lambda member: mesh.kv.rows_of((members[member],), part),
            own=(chunk.local(local(Kind.K)), chunk.local(local(Kind.V))),
            results=(chunk.local(local(Kind.GRAD_K)), chunk.local(local(Kind.GRAD_V))),
            gradients=self._gradients,
            shared=self._shared,
            per_node=self._per_node,
            part=part,
            begun=begun,
        )


def plan_ring(problem: Problem, ranks: int, setting: RingSetting, directions: Directions) -> Plan:
    shared = shared_options("ring", setting)
    reach = setting.gradients
    return plan_rotating(problem, ranks, shared, directions, gradients=reach, setting=setting)


def plan_double_ring(
    problem: Problem, ranks: int, setting: DoubleRingSetting, directions: Directions
) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses or 1, setting.ranks_per_node)
    units, inner = ranks // degree, setting.inner
    if inner is None:
        inner = usual_inner(units, degree, setting.ranks_per_node)
    if units % inner:
        fits = ", ".join(str(a) for a, _ in factorisations(units))
        raise PlanError(f"inner={inner} does not divide {units} ranks; sizes that do: {fits}")
    shared = shared_options("double-ring", setting, ulysses=degree)
    return plan_rotating(problem, ranks, shared, directions, inner=inner, setting=setting)


def usual_inner(units: int, degree: int, ranks_per_node: int | None) -> int:
    """Inner rings as large as what a degree of Ulysses leaves of a node."""
    most = max((ranks_per_node or 8) // degree, 1)
    return max(size for size, _ in factorisations(units) if size <= most)


def plan_agq_ringkv(
    problem: Problem, ranks: int, setting: AgqRingKvSetting, directions: Directions
) -> Plan:
    shared = shared_options("agq-ringkv", setting)
    tile = setting.tile or squarest(ranks)
    return plan_rotating(problem, ranks, shared, directions, tile=tile, gradients=setting.gradients)


def plan_usp(problem: Problem, ranks: int, setting: UspSetting, directions: Directions) -> Plan:
    degree = chosen_degree(problem, ranks, setting.ulysses, setting.ranks_per_node)
    shared = shared_options("usp", setting, ulysses=degree)
    reach = setting.gradients
    return plan_rotating(problem, ranks, shared, directions, gradients=reach, setting=setting)


def plan_rotating(
    problem: Problem,
    num_ranks: int,
    shared: SharedOptions,
    directions: Directions,
    *,
    tile: tuple[int, int] | None = None,
    gradients: Reach = Reach.DIRECT,
    inner: int | None = None,
    setting: ChunkSetting | None = None,
) -> Plan:
    """Tile None: one row, as Ring-Attention has it. `setting`: how it is cut, if at all."""
    degree = shared.ulysses
    units = num_ranks // degree
    fits = tile_for(tile or (1, units), units)
    cuts = setting or ChunkSetting()
    if not is_cut(cuts) and degree > 1 and not shared.relayout:
        chunks, heads = suggested_ring_cut(problem, num_ranks, degree, shared.ranks_per_node)
        cuts = replace(cuts, chunks=chunks, head_slices=heads)

    def cut(direction: Direction) -> PassCut:
        return cut_of(cuts, direction, problem, degree)

    def builder(mesh: TilePass, lowerings: Lowerings, nodes: tuple[int, ...]) -> KeyRingBuilder:
        return KeyRingBuilder(mesh, lowerings, gradients, inner, nodes)

    return plan_by(problem, num_ranks, shared, fits, directions, builder, cut)
