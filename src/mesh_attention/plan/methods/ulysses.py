"""Ulysses: heads first. Ranks exchange tokens for heads, attend, and exchange back.

Where the ranks share out the heads evenly it is a mesh of one unit. Any other number of ranks, up
to one for each head, has shares of heads that differ (`head_group.py`). A share that cuts a KV
group needs up to three attentions, since kernels take as many query heads for each KV head: of the
rest of a group, of whole groups, and of the beginning of one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mesh_attention.errors import PlanError
from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.head_group import ulysses_degrees
from mesh_attention.plan.build.setting import ChunkSetting
from mesh_attention.plan.build.tile_builder import TileBuilder
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.build.tile_plan import plan_by, shared_options, tile_for
from mesh_attention.plan.build.tile_tasks import buffers_of
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.methods.mesh import MeshSetting, plan_mesh
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Operation, Task
from mesh_attention.plan.schedule.tasks import Schedule, Step

MOST_STRETCHES = 3


@dataclass(frozen=True)
class UlyssesSetting(ChunkSetting):
    """How finely rows and heads are exchanged; the degree is the number of ranks, at most that of
    the heads. Uneven shares of heads are exchanged at once."""


def plan_ulysses(
    problem: Problem, ranks: int, setting: UlyssesSetting, directions: tuple[Direction, ...]
) -> Plan:
    if ranks in ulysses_degrees(problem):
        given = {one.name: getattr(setting, one.name) for one in fields(setting)}
        mesh = MeshSetting(tile=(1, 1), **given)
        return plan_mesh(problem, ranks, mesh, directions, degree=ranks, method="ulysses")
    if ranks > problem.num_heads:
        raise PlanError(
            f"{ranks} ranks do not share out {problem.num_heads} heads, of which each needs at "
            f"least one; numbers of ranks that work: 1 to {problem.num_heads}. Method mesh-usp "
            "exchanges heads among some of the ranks, and takes any number"
        )

    slices = setting.head_slices or setting.backward_head_slices
    if slices or any(c not in (None, (1, 1)) for c in (setting.chunks, setting.backward_chunks)):
        raise PlanError(
            f"{ranks} ranks do not share out {problem.num_heads} heads evenly: uneven shares are "
            "exchanged at once; leave 'chunks' and 'head_slices' out"
        )

    def builder(mesh: TilePass, lowerings: Lowerings, nodes: tuple[int, ...]) -> StretchBuilder:
        return StretchBuilder(mesh, lowerings)

    shared = shared_options("ulysses", setting, ulysses=ranks)
    return plan_by(problem, ranks, shared, tile_for((1, 1), 1), directions, builder)


class StretchBuilder(TileBuilder):
    """All tokens of a share of heads: an attention for each stretch of them (`HeadGroup`)."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings) -> None:
        super().__init__(mesh)
        self._lowerings = lowerings

    @property
    def setting(self) -> dict[str, str]:
        heads, ranks = self.head_group.problem.num_heads, self.head_group.degree
        most = -(-heads // ranks)
        return {"heads": f"at most {most} a rank, work max/mean {most * ranks / heads:.3f}"}

    @property
    def schedule(self) -> Schedule:
        """Of the most stretches that a share can have."""
        steps: list[Step] = []
        for at in range(MOST_STRETCHES):
            steps.append(Step(None, (Task("C", (at, at)),)))
            steps += [Step(Task(kind, (at,)), ()) for kind in self._reductions()]
        return Schedule(tuple(steps))

    def _reductions(self) -> list[str]:
        mesh = self._mesh
        return [kind for kind in (mesh.q_reduce_kind, mesh.kv_reduce_kind) if kind]

    def unit(self, unit: int) -> Unit:
        mesh, lowerings = self._mesh, self._lowerings
        operations: list[Operation] = []
        for at in range(len(mesh.q.chunks)):
            calls = lowerings.calls(
                lowerings.queries(mesh.q.spans(0, at)), lowerings.keys(mesh.kv.spans(0, at))
            )
            if calls:
                operations.append(mesh.compute(at, at, calls, (True, True)))
            else:
                operations += mesh.q.empty(mesh.q_reduce_kind, at)
                if mesh.kv_reduce_kind:
                    operations += mesh.kv.empty(mesh.kv_reduce_kind, at)
            operations += mesh.reduce_q(at, mesh.q.reduction(unit, at))
            if mesh.kv_reduce_kind:
                operations += mesh.reduce_kv(at, mesh.kv.reduction(unit, at))
        return Unit(operations, buffers_of(mesh, unit))
