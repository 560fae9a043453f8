"""Methods whose keys rotate: ring, double ring, AGQ-RingKV; and Ulysses and USP around a ring.

The Q side is that of a tile (a team of `a` gathers its Q and reduces its outputs); the KV side is a
`KeyRing` through the KV group. Tile 1 x n is Ring-Attention. Ulysses is a ring of one unit, which
has all tokens of its heads and nothing left to fetch (`ulysses.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import factorisations
from mesh_attention.plan.buffers import Kind
from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.head_group import chosen_degree
from mesh_attention.plan.build.key_ring import KeyRing, rotating_schedule
from mesh_attention.plan.build.rotate import Reach, double_ring, members_per_node, ring
from mesh_attention.plan.build.setting import (
    DegreeSetting,
    RotationSetting,
    TileSetting,
    option,
)
from mesh_attention.plan.build.tile_builder import TileBuilder
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.build.tile_plan import (
    SharedOptions,
    plan_by,
    shared_options,
    squarest,
    tile_for,
)
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Operation, Task
from mesh_attention.plan.schedule.tasks import Schedule, Step

Directions = tuple[Direction, ...]


@dataclass(frozen=True)
class RingSetting(RotationSetting):
    """Keys rotate in one ring."""


@dataclass(frozen=True)
class DoubleRingSetting(DegreeSetting):
    """Rings of `inner` ranks, and one ring of such rings."""

    inner: int | None = option(
        None, "ranks of an inner ring: divides the ranks (the units); left out: those of a node"
    )


@dataclass(frozen=True)
class AgqRingKvSetting(TileSetting, RotationSetting):
    """A mesh whose Q is gathered and whose KV rotates inside the KV group."""


@dataclass(frozen=True)
class UspSetting(RotationSetting, DegreeSetting):
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
        self._shared: dict[object, list[Operation]] = {}

    @property
    def setting(self) -> dict[str, str]:
        setting = {"tile": str(self._mesh.tile), "kv": "ring"}
        if self._inner:
            setting["kv"] = f"rings of {self._inner}"
        if self._mesh.tile.a > 1:
            setting["q_reduce"] = self._mesh.q.reduce_by.value
        if self.direction is Direction.BACKWARD:
            setting["gradients"] = self._gradients.value
        return setting

    @property
    def schedule(self) -> Schedule:
        backward = self.direction is Direction.BACKWARD
        steps = rotating_schedule(self._mesh.tile.b, backward=backward, per_node=self._per_node)
        reduce = Task(self._mesh.q_reduce_kind, (0,))
        return Schedule((Step(Task("AG-Q", (0,)), ()), *steps, Step(reduce, ())))

    def unit(self, unit: int) -> Unit:
        mesh, head_group = self._mesh, self.head_group
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        members = mesh.tile.kv_group(column)
        local, place = head_group.local, (members.index(unit), len(members))
        rotation = double_ring(*place, self._inner) if self._inner else ring(*place)
        keys = KeyRing(
            mesh,
            self._lowerings,
            row,
            head_group.group_name(f"KV{column}"),
            rotation,
            lambda member: mesh.kv.own_rows(members[member]),
            own=(local(Kind.K), local(Kind.V)),
            results=(local(Kind.GRAD_K), local(Kind.GRAD_V)),
            gradients=self._gradients,
            shared=self._shared,
            per_node=self._per_node,
        )
        operations: list[Operation] = [mesh.gather_q(row, 0)] if mesh.tile.a > 1 else []
        operations += [*keys.operations, *mesh.reduce_q(0, mesh.q.reduction(unit, 0))]
        return Unit(operations, {**mesh.q.buffers(row), **mesh.stack_buffers(unit), **keys.buffers})


def plan_ring(problem: Problem, ranks: int, setting: RingSetting, directions: Directions) -> Plan:
    shared = shared_options("ring", setting)
    return plan_rotating(problem, ranks, shared, directions, gradients=setting.gradients)


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
    return plan_rotating(problem, ranks, shared, directions, gradients=Reach.DIRECT, inner=inner)


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
    return plan_rotating(problem, ranks, shared, directions, gradients=setting.gradients)


def plan_rotating(
    problem: Problem,
    num_ranks: int,
    shared: SharedOptions,
    directions: Directions,
    *,
    tile: tuple[int, int] | None = None,
    gradients: Reach = Reach.DIRECT,
    inner: int | None = None,
) -> Plan:
    """Tile None: one row, as Ring-Attention has it."""
    units = num_ranks // shared.ulysses
    fits = tile_for(tile or (1, units), units)

    def builder(mesh: TilePass, lowerings: Lowerings, nodes: tuple[int, ...]) -> KeyRingBuilder:
        return KeyRingBuilder(mesh, lowerings, gradients, inner, nodes)

    return plan_by(problem, num_ranks, shared, fits, directions, builder)
