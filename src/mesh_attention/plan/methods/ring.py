"""Ring-Attention and its kin, where KV wanders: ring, double ring, AGQ-RingKV, USP's outer ring.

The Q side is the mesh's own (a team of `a` gathers its Q and brings its outputs home); the KV side
is a `KeyRing` through the KV group. Tile 1 x n is Ring-Attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh_attention.errors import PlanError
from mesh_attention.plan.assignment import Tile, factorisations, tiles_of
from mesh_attention.plan.buffers import Buffer, Kind
from mesh_attention.plan.methods.circulate import Route, double_ring, ring
from mesh_attention.plan.methods.frame import Frame, plan_by
from mesh_attention.plan.methods.key_steps import Gradients, KeySteps, QueryPieces
from mesh_attention.plan.methods.kv_ring import KeyRing
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.on_mesh import OnMesh
from mesh_attention.plan.methods.setting import Setting, TileSetting
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Operation
from mesh_attention.plan.schedule.tasks import Schedule, Step

__all__ = ["AgqRingKvSetting", "DoubleRingSetting", "RingSetting", "plan_kv_ring"]


@dataclass(frozen=True, slots=True)
class RingSetting(Setting):
    """Keys wander in one ring. `gradients`: how dK and dV come home."""

    gradients: Gradients = Gradients.TRAVEL


@dataclass(frozen=True, slots=True)
class DoubleRingSetting(Setting):
    """Rings of `inner` ranks (None: the ranks of a node), and one ring of such rings."""

    inner: int | None = None
    ulysses: int = 1


@dataclass(frozen=True, slots=True)
class AgqRingKvSetting(TileSetting):
    """A mesh whose Q is gathered and whose KV wanders inside the KV group."""

    gradients: Gradients = Gradients.TRAVEL


class KvRingInner(OnMesh):
    """What `weave` asks of a method, for wandering keys."""

    def __init__(
        self, mesh: MeshPass, lowerings: Lowerings, gradients: Gradients, inner: int | None
    ) -> None:
        super().__init__(mesh)
        self._lowerings = lowerings
        self._gradients = gradients
        self._inner = inner
        own = (mesh.strand.local(Kind.K), mesh.strand.local(Kind.V))
        self._queries = query_pieces(mesh)
        self._steps = KeySteps(own, mesh.strand.size(Kind.K), self._queries)
        self._made: tuple[int, KeyRing] | None = None

    @property
    def setting(self) -> dict[str, str]:
        setting = {"tile": str(self._mesh.tile), "kv": "ring"}
        if self._inner:
            setting["kv"] = f"rings of {self._inner}"
        if self._mesh.tile.a > 1:
            setting["q_home"] = self._mesh.q_route.value
        if self.direction is Direction.BACKWARD:
            setting["gradients"] = self._gradients.value
        return setting

    @property
    def schedule(self) -> Schedule:
        backward = self.direction is Direction.BACKWARD
        steps = [Step(name, tuple(tasks)) for name, tasks in self._ring(0).steps(backward)]
        return Schedule((Step("AG-Q-0", ()), *steps, Step(f"{self._mesh.q_return}-0", ())))

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]:
        mesh = self._mesh
        return {
            **mesh.row_buffers(mesh.tile.row(unit)),
            **mesh.stack_buffers(unit),
            **self._ring(unit).buffers,
        }

    def unit_operations(self, unit: int) -> Sequence[Operation]:
        mesh, key_ring = self._mesh, self._ring(unit)
        row = mesh.tile.row(unit)
        gather: list[Operation] = [mesh.gather_q(row, 0)] if mesh.tile.a > 1 else []
        if self.direction is Direction.FORWARD:
            wandering = key_ring.forward()
        else:
            results = (self.strand.local(Kind.GRAD_K), self.strand.local(Kind.GRAD_V))
            wandering = key_ring.backward(self._gradients, results)
        return [*gather, *wandering, *mesh.return_q(0, mesh.q_home(row, 0))]

    def _ring(self, unit: int) -> KeyRing:
        if self._made is None or self._made[0] != unit:
            self._made = (unit, self._make_ring(unit))
        return self._made[1]

    def _make_ring(self, unit: int) -> KeyRing:
        mesh, strand = self._mesh, self.strand
        column = mesh.tile.column(unit)
        members = mesh.tile.kv_group(column)
        return KeyRing(
            strand.group_name(f"KV{column}"),
            self._route(members.index(unit), len(members)),
            lambda member: mesh.own_rows(Kind.K, members[member]),
            strand.heads(Kind.K),
            mesh.q_spans(mesh.tile.row(unit), 0),
            self._queries,
            self._steps,
            self._lowerings,
        )

    def _route(self, member: int, size: int) -> Route:
        return double_ring(member, size, self._inner) if self._inner else ring(member, size)


def query_pieces(mesh: MeshPass) -> QueryPieces:
    """The query side of a mesh pass that is not chunked."""
    q = mesh.q_piece("q", 0)
    if mesh.direction is Direction.FORWARD:
        return QueryPieces(q, mesh.q_partial("out", 0), mesh.q_partial("lse", 0))
    has_out = Kind.OUT in mesh.q_inputs
    return QueryPieces(
        q,
        out=q,
        lse=mesh.q_piece("lse", 0),
        grad_out=mesh.q_piece("grad_out", 0),
        full_out=mesh.q_piece("out", 0) if has_out else None,
        delta=None if has_out else mesh.q_piece("delta", 0),
        grad_q=mesh.q_partial("grad_q", 0),
    )


def plan_kv_ring(
    problem: Problem,
    num_ranks: int,
    frame: Frame,
    directions: tuple[Direction, ...],
    *,
    tile: tuple[int, int] | None = None,
    gradients: Gradients = Gradients.TRAVEL,
    inner: int | None = None,
) -> Plan:
    """Tile None: one row, as Ring-Attention has it."""
    units = num_ranks // frame.ulysses
    shape = Tile(*(tile or (1, units)))
    if shape.num_ranks != units:
        raise PlanError(
            f"tile {shape} does not have {units} cells; tiles that fit: {tiles_of(units)}"
        )
    if inner is not None and (inner < 1 or units % inner):
        fits = ", ".join(str(a) for a, _ in factorisations(units))
        raise PlanError(f"inner={inner} does not divide {units} ranks; sizes that do: {fits}")
    return plan_by(
        problem,
        num_ranks,
        frame,
        shape,
        directions,
        lambda mesh, lowerings: KvRingInner(mesh, lowerings, gradients, inner),
    )
