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
from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.methods.circulate import Route, hop, ring
from mesh_attention.plan.methods.frame import Frame, plan_by
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass, OnMesh
from mesh_attention.plan.methods.setting import Setting, TileSetting
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    AllToAll,
    Attend,
    AttendBackward,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
)
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
            self._made = (unit, _UnitRing(self._mesh, self._lowerings, unit, self._travel))
        return self._made[1]


class _UnitRing:
    """The steps of one unit."""

    def __init__(self, mesh: MeshPass, lowerings: Lowerings, unit: int, travel: bool) -> None:
        self._mesh = mesh
        self._lowerings = lowerings
        self._travel = travel
        tile, strand = mesh.tile, mesh.strand
        members = tile.q_group(tile.row(unit))
        self._route: Route = ring(members.index(unit), len(members))
        self._group = strand.group_name(f"Q{tile.row(unit)}")
        self._rows = [strand.rows(Kind.Q, members[m]) for m in self._route.blocks]
        self._keys: Spans = mesh.kv_spans(tile.column(unit), 0)
        self._size = strand.size(Kind.Q)
        # What a partial result of a Q block consists of.
        self._kinds = tuple(kind for _, kind in mesh.q_partials())
        self._backward = mesh.direction is Direction.BACKWARD
        self._rule = MergeRule.SUM if self._backward else MergeRule.SOFTMAX
        self.has_key_gradients = False
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, self._route.size):
            for kind in mesh.q_inputs:
                self._add(f"{kind}.{step}", kind, step)

    def _add(self, name: str, kind: Kind, step: int, *, accumulate: bool = False) -> Piece:
        wide = accumulate or kind.is_statistic
        precision = Precision.ACCUMULATE if wide else Precision.ELEMENT
        heads = self._mesh.strand.heads(kind)
        self.buffers[name] = Buffer(name, kind, self._rows[step], heads, precision)
        return Piece(name, 0, self._size)

    def _queries(self, step: int) -> dict[Kind, Piece]:
        strand = self._mesh.strand
        return {
            kind: Piece(strand.local(kind) if step == 0 else f"{kind}.{step}", 0, self._size)
            for kind in self._mesh.q_inputs
        }

    def _travelling(self, step: int) -> tuple[Piece, ...]:
        return tuple(self._queries(step).values())

    def operations(self) -> list[Operation]:
        operations: list[Operation] = []
        partials: dict[int, tuple[Piece, ...]] = {}
        begun = False
        for step in range(self._route.size):
            if step + 1 < self._route.size:
                name = f"Q-{step + 1}"
                operations.append(hop(name, self._group, self._route, step + 1, self._travelling))
            sums = tuple(
                self._add(f"{kind}.{step}.sum", kind, step, accumulate=True) for kind in self._kinds
            )
            calls = self._lowerings.between(self._rows[step], self._keys)
            if calls:
                operations.append(self._compute(step, sums, begun))
                begun = begun or self._backward
            else:
                operations.append(Merge("C.empty", self._rule, (), sums))
            partials[step] = sums
            if self._travel and step > 0:
                operations += self._pass_on(step, sums)
        self.has_key_gradients = begun
        return operations + (self._end_of_travel() if self._travel else self._exchange(partials))

    def _compute(self, step: int, sums: tuple[Piece, ...], begun: bool) -> Operation:
        mesh, name = self._mesh, f"C-{step}-0"
        queries = self._queries(step)
        calls = self._lowerings.between(self._rows[step], self._keys)
        keys = (mesh.kv_piece("k", 0), mesh.kv_piece("v", 0))
        if not self._backward:
            return Attend(name, queries[Kind.Q], *keys, sums[0], sums[1], calls, fresh=True)
        return AttendBackward(
            name,
            queries[Kind.Q],
            *keys,
            queries[Kind.GRAD_OUT],
            queries[Kind.LSE],
            queries.get(Kind.OUT),
            queries.get(Kind.DELTA),
            sums[0],
            mesh.kv_partial("grad_k", 0),
            mesh.kv_partial("grad_v", 0),
            calls,
            fresh_q=True,
            fresh_kv=not begun,
        )

    def _results(self) -> tuple[Piece, ...]:
        return tuple(Piece(self._mesh.strand.local(kind), 0, self._size) for kind in self._kinds)

    def _pass_on(self, step: int, sums: tuple[Piece, ...]) -> list[Operation]:
        """RingQ/O: merge into what came with the block, and send it after the block."""
        parts = sums
        if step > 1:
            parts += tuple(Piece(f"{kind}.{step}.sofar", 0, self._size) for kind in self._kinds)
        wires = tuple(self._add(f"{kind}.{step}.wire", kind, step) for kind in self._kinds)
        last = step == self._route.size - 1
        suffix, arrives = ("home", 0) if last else (f"{step + 1}.sofar", step + 1)
        incoming = tuple(self._add(f"{kind}.{suffix}", kind, arrives) for kind in self._kinds)
        way = self._route.hops[0]
        return [
            Merge(f"O-{step}.merge", self._rule, parts, wires),
            SendRecv(f"O-{step}", self._group, way.to_member, wires, way.from_member, incoming),
        ]

    def _end_of_travel(self) -> list[Operation]:
        parts = tuple(Piece(f"{kind}.0.sum", 0, self._size) for kind in self._kinds)
        if self._route.size > 1:
            parts += tuple(Piece(f"{kind}.home", 0, self._size) for kind in self._kinds)
        return [Merge("O.end", self._rule, parts, self._results())]

    def _exchange(self, partials: dict[int, tuple[Piece, ...]]) -> list[Operation]:
        """Pass-Q: every partial to its owner in one all-to-all; the own one stays."""
        route, name = self._route, f"{self._mesh.q_return}-0"
        operations: list[Operation] = []
        sends: list[tuple[Piece, ...]] = [()] * route.size
        receives: list[tuple[Piece, ...]] = [()] * route.size
        parts = partials[0]
        for step in range(1, route.size):
            wires = []
            for kind, total in zip(self._kinds, partials[step], strict=True):
                wires.append(total)
                if not kind.is_statistic and self._mesh.wire(total.buffer) != total.buffer:
                    wires[-1] = self._add(self._mesh.wire(total.buffer), kind, step)
                    cast = Merge(f"{name}.cast", MergeRule.SUM, (total,), (wires[-1],))
                    operations.append(cast)
            arrived = tuple(self._add(f"{kind}.{step}.in", kind, 0) for kind in self._kinds)
            sends[route.blocks[step]] = tuple(wires)
            receives[route.users[step]] = arrived
            parts += arrived
        if route.size > 1:
            operations.append(AllToAll(name, self._group, tuple(sends), tuple(receives)))
        operations.append(Merge(f"{name}.merge", self._rule, parts, self._results()))
        return operations


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
