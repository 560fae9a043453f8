"""Methods whose keys stay and whose queries wander: pass-Q ring, and AGKV-RingQ/O.

Units gather KV in their KV group (b = 1: nothing to gather); Q wanders through the Q group.
Partial outputs go home by one all-to-all at the end (pass-Q), or travel with their Q, each hop
merging into what it brought (RingQ/O): then a hop needs the output of the hop before, which limits
overlap. algorithm.md, section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile, tiles_of
from mesh_attention.plan.buffers import Buffer, Kind
from mesh_attention.plan.methods.circulate import Route, hop, ring
from mesh_attention.plan.methods.frame import Frame, plan_by
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.on_mesh import OnMesh
from mesh_attention.plan.methods.query_steps import Form, Pieces, QuerySteps
from mesh_attention.plan.methods.setting import Setting, TileSetting
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import AllToAll, Call, Operation, SendRecv
from mesh_attention.plan.schedule.tasks import Schedule, Step

__all__ = ["AgkvRingQoSetting", "RingQSetting", "plan_q_ring"]


@dataclass(frozen=True, slots=True)
class RingQSetting(Setting):
    """Queries wander in one ring; partial outputs go home by all-to-all."""


@dataclass(frozen=True, slots=True)
class AgkvRingQoSetting(TileSetting):
    """A mesh whose KV is gathered; Q with its partial output wanders inside the Q group."""


class QRingInner(OnMesh):
    """What `weave` asks of a method, for wandering queries."""

    def __init__(self, mesh: MeshPass, lowerings: Lowerings, *, travel: bool) -> None:
        super().__init__(mesh)
        self._lowerings = lowerings
        self._travel = travel
        self._steps = QuerySteps(mesh)
        self._made: tuple[int, _UnitRing] | None = None

    @property
    def setting(self) -> dict[str, str]:
        home = "travels with Q" if self._travel else "all-to-all"
        return {"tile": str(self._mesh.tile), "q": "ring", "q_home": home}

    @property
    def schedule(self) -> Schedule:
        size, mesh = self._mesh.tile.a, self._mesh
        steps = [Step("AG-KV-0", ())]
        for s in range(size):
            steps.append(Step(f"Q-{s + 1}" if s + 1 < size else None, (f"C-{s}-0",)))
            if self._travel and s:
                steps.append(Step(f"O-{s}", ()))
        if not self._travel:
            steps.append(Step(f"{mesh.q_return}-0", ()))
        if mesh.kv_return:
            steps.append(Step(f"{mesh.kv_return}-0", ()))
        return Schedule(tuple(steps))

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]:
        mesh = self._mesh
        return {
            **mesh.column_buffers(mesh.tile.column(unit)),
            **mesh.stack_buffers(unit),
            **self._unit(unit).buffers,
        }

    def unit_operations(self, unit: int) -> Sequence[Operation]:
        mesh = self._mesh
        key = mesh.fetch_key(unit)
        fetch: list[Operation] = [mesh.fetch_kv(key, 0)] if mesh.tile.b > 1 else []
        operations = [*fetch, *self._unit(unit).operations()]
        if mesh.kv_return:
            if not self._unit(unit).has_key_gradients:
                operations += mesh.empty_kv(0)
            operations += mesh.return_kv(0, mesh.kv_home(key, 0))
        return operations

    def _unit(self, unit: int) -> _UnitRing:
        if self._made is None or self._made[0] != unit:
            made = _UnitRing(self._mesh, self._lowerings, self._steps, unit, self._travel)
            self._made = (unit, made)
        return self._made[1]


class _UnitRing:
    """The steps of one unit."""

    def __init__(
        self, mesh: MeshPass, lowerings: Lowerings, steps: QuerySteps, unit: int, travel: bool
    ) -> None:
        self._mesh = mesh
        self._lowerings = lowerings
        self._steps = steps
        self._travel = travel
        tile, strand = mesh.tile, mesh.strand
        members = tile.q_group(tile.row(unit))
        self._route: Route = ring(members.index(unit), len(members))
        self._group = strand.group_name(f"Q{tile.row(unit)}")
        self._rows = [mesh.own_rows(Kind.Q, members[m]) for m in self._route.blocks]
        self._keys = lowerings.keys(mesh.kv_spans(tile.column(unit), 0))
        self._heads = strand.heads(Kind.Q)
        self.has_key_gradients = False
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, self._route.size):
            self._add(steps.queries(step), steps.input_forms, step)

    def _add(self, pieces: Pieces, forms: Sequence[Form], step: int) -> None:
        """Declare the buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._heads
        for piece, (kind, precision) in zip(pieces, forms, strict=True):
            self.buffers[piece.buffer] = Buffer(piece.buffer, kind, rows, heads, precision)

    def _calls(self, step: int) -> tuple[Call, ...]:
        return self._lowerings.calls(self._lowerings.queries(self._rows[step]), self._keys)

    def operations(self) -> list[Operation]:
        steps, route = self._steps, self._route
        operations: list[Operation] = []
        begun = False
        for step in range(route.size):
            if step + 1 < route.size:
                operations.append(hop(f"Q-{step + 1}", self._group, route, step + 1, steps.queries))
            self._add(steps.partial(f"{step}.sum"), steps.sum_forms, step)
            calls = self._calls(step)
            if calls:
                operations.append(steps.attend(step, calls, fresh_kv=not begun))
                begun = begun or steps.backward
            else:
                operations.append(steps.empty(step))
            if self._travel and step > 0:
                operations += self._pass_on(step)
        self.has_key_gradients = begun
        if self._travel:
            return [*operations, steps.end_of_travel(came_home=route.size > 1)]
        return operations + self._exchange()

    def _pass_on(self, step: int) -> list[Operation]:
        """RingQ/O: merge into what came with the block, and send it after the block."""
        steps, way = self._steps, self._route.hops[0]
        last = step == self._route.size - 1
        suffix, arrives = ("home", 0) if last else (f"{step + 1}.sofar", step + 1)
        outgoing, incoming = steps.partial(f"{step}.wire"), steps.partial(suffix)
        self._add(outgoing, steps.wire_forms, step)
        self._add(incoming, steps.wire_forms, arrives)
        return [
            steps.merge_on(step),
            SendRecv(f"O-{step}", self._group, way.to_member, outgoing, way.from_member, incoming),
        ]

    def _exchange(self) -> list[Operation]:
        """Pass-Q: every partial to its owner in one all-to-all; the own one stays."""
        steps, route = self._steps, self._route
        operations: list[Operation] = []
        sends: list[Pieces] = [()] * route.size
        receives: list[Pieces] = [()] * route.size
        for step in range(1, route.size):
            outgoing, casts = steps.casts(step)
            for cast in casts:
                self._add(cast.operation.outputs, (cast.form,), step)
                operations.append(cast.operation)
            incoming = steps.partial(f"{step}.in")
            self._add(incoming, steps.wire_forms, 0)
            sends[route.blocks[step]] = outgoing
            receives[route.users[step]] = incoming
        if route.size > 1:
            name = f"{self._mesh.q_return}-0"
            operations.append(AllToAll(name, self._group, tuple(sends), tuple(receives)))
        return [*operations, steps.merge_all(route.size)]


def plan_q_ring(
    problem: Problem,
    num_ranks: int,
    frame: Frame,
    directions: tuple[Direction, ...],
    *,
    tile: tuple[int, int] | None = None,
    travel: bool = False,
) -> Plan:
    """Tile None: one column, so that all queries pass all ranks."""
    units = num_ranks // frame.ulysses
    shape = Tile(*(tile or (units, 1)))
    if shape.num_ranks != units:
        raise PlanError(
            f"tile {shape} does not have {units} cells; tiles that fit: {tiles_of(units)}"
        )
    return plan_by(
        problem,
        num_ranks,
        frame,
        shape,
        directions,
        lambda mesh, lowerings: QRingInner(mesh, lowerings, travel=travel),
    )
