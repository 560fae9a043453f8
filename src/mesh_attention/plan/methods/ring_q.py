"""Methods whose keys stay and whose queries rotate: pass-Q ring, and AGKV-RingQ/O.

Units gather KV in their KV group (b = 1: nothing to gather); Q rotates through the Q group. Partial
outputs reach their owners by one all-to-all at the end (pass-Q), or step by step (RingQ/O): direct,
or travelling with their Q, each hop merging into what it brought. Then a hop needs the output of
the hop before, which limits overlap, and rounds again. algorithm.md, section 9.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.query_ring import QueryRing
from mesh_attention.plan.build.rotate import Reach, deliveries, members_per_node, ring
from mesh_attention.plan.build.setting import Setting, TileSetting, option
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
class RingQSetting(Setting):
    """Queries rotate in one ring; partial outputs reach their owners by all-to-all."""


@dataclass(frozen=True)
class AgkvRingQoSetting(TileSetting):
    """A mesh whose KV is gathered; Q with its partial output rotates inside the Q group."""

    outputs: Reach = option(
        Reach.DIRECT,
        "O and dQ go `direct` to the owner, once from each node, or `travel` with their Q",
        "NAME",
    )


class QueryRingBuilder(TileBuilder):
    """Units whose queries rotate in the Q group."""

    def __init__(
        self, mesh: TilePass, lowerings: Lowerings, reach: Reach | None, nodes: tuple[int, ...]
    ) -> None:
        super().__init__(mesh)
        self._lowerings = lowerings
        self._reach = reach
        self._per_node: int | None = None
        if reach is Reach.DIRECT:
            rows = range(mesh.tile.b)
            self._per_node = members_per_node(map(mesh.tile.q_group, rows), nodes)

    @property
    def setting(self) -> dict[str, str]:
        reduce = "all-to-all" if self._reach is None else self._reach.value
        return {"tile": str(self._mesh.tile), "q": "ring", "q_reduce": reduce}

    @property
    def schedule(self) -> Schedule:
        size, mesh = self._mesh.tile.a, self._mesh
        steps = [Step(Task("AG-KV", (0,)), ())]
        for s, back in enumerate(deliveries(ring(0, size), self._per_node)):
            following = Task("Q", (s + 1,)) if s + 1 < size else None
            steps.append(Step(following, (Task("C", (s, 0)),)))
            steps += [Step(Task("O", (one.step,)), ()) for one in back if self._reach]
        if not self._reach:
            steps.append(Step(Task(mesh.q_reduce_kind, (0,)), ()))
        if mesh.kv_reduce_kind:
            steps.append(Step(Task(mesh.kv_reduce_kind, (0,)), ()))
        return Schedule(tuple(steps))

    def unit(self, unit: int) -> Unit:
        mesh, key = self._mesh, self._mesh.fetch_key(unit)
        queries = QueryRing(mesh, self._lowerings, unit, self._reach, self._per_node)
        operations: list[Operation] = [mesh.fetch_kv(key, 0)] if mesh.tile.b > 1 else []
        operations += queries.operations
        if mesh.kv_reduce_kind:
            if not queries.has_key_gradients:
                operations += mesh.kv.empty(mesh.kv_reduce_kind, 0)
            operations += mesh.reduce_kv(0, mesh.kv.reduction(unit, 0))
        return Unit(
            operations,
            {
                **mesh.kv.buffers(mesh.tile.column(unit)),
                **mesh.stack_buffers(unit),
                **queries.buffers,
            },
        )


def plan_ring_q(
    problem: Problem, ranks: int, setting: RingQSetting, directions: Directions
) -> Plan:
    return _plan(problem, ranks, shared_options("ring-q", setting), directions, (ranks, 1))


def plan_agkv_ringqo(
    problem: Problem, ranks: int, setting: AgkvRingQoSetting, directions: Directions
) -> Plan:
    shared = shared_options("agkv-ringqo", setting)
    tile = setting.tile or squarest(ranks)
    return _plan(problem, ranks, shared, directions, tile, setting.outputs)


def _plan(
    problem: Problem,
    ranks: int,
    shared: SharedOptions,
    directions: Directions,
    shape: tuple[int, int],
    reach: Reach | None = None,
) -> Plan:
    def builder(mesh: TilePass, lowerings: Lowerings, nodes: tuple[int, ...]) -> QueryRingBuilder:
        return QueryRingBuilder(mesh, lowerings, reach, nodes)

    return plan_by(problem, ranks, shared, tile_for(shape, ranks), directions, builder)
