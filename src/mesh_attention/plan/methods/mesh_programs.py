"""The mesh on one strand: every unit's operations, in the order of its tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.lower import Queries, RowList
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.mesh_tasks import CAPPED, buffers_of, fragment, parts_of
from mesh_attention.plan.methods.on_mesh import OnMesh
from mesh_attention.plan.program import Call, Operation
from mesh_attention.plan.schedule import Schedule

__all__ = ["MeshInner"]

# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1


class MeshInner(OnMesh):
    """What `weave` asks of a method, for the mesh."""

    def __init__(self, mesh: MeshPass, schedule: Schedule, lowerings: Lowerings, ordered_by: str):
        super().__init__(mesh)
        self.schedule = schedule
        self._steps = [[parts_of(name) for name in step.tasks()] for step in schedule.steps]
        self._lowerings = lowerings
        self._ordered_by = ordered_by
        self.capped = ordered_by == CAPPED
        self._fragments: dict[tuple[object, ...], list[list[Operation]]] = {}
        self._computes: dict[tuple[object, ...], Operation] = {}
        self._neutral_q = [mesh.empty_q(i) for i in range(len(mesh.q_chunks))]
        kv_chunks = range(len(mesh.kv_chunks)) if mesh.kv_return else ()
        self._neutral_kv = [mesh.empty_kv(j) for j in kv_chunks]

    @property
    def setting(self) -> dict[str, str]:
        mesh = self._mesh
        num_q, num_kv = mesh.chunks_of_slice
        return {
            "tile": str(mesh.tile),
            "rotation": "on" if mesh.tile.rotation else "off",
            "chunks": f"{num_q}x{num_kv}",
            **({"head_slices": "+".join(map(str, mesh.slices))} if len(mesh.slices) > 1 else {}),
            "q_home": mesh.q_route.value,
            "kv_home": mesh.kv_route.value if mesh.kv_return else "none",
            "scheduler": self._ordered_by,
        }

    @property
    def hold(self) -> int:
        alone = self._mesh.tile.num_ranks == 1
        return 0 if self.capped or alone else HOLD

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]:
        return buffers_of(self._mesh, unit)

    def unit_operations(self, unit: int) -> Sequence[Operation]:
        mesh = self._mesh
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        operations: list[Operation] = []
        begun_q: set[int] = set()
        begun_kv: set[int] = set()
        later: list[deque[list[Operation]]] = []  # parts of the tasks under way
        for step in self._steps:
            for kind, index in step:
                if kind.startswith("C-"):
                    i, j = int(kind[2:]), index
                    calls = self._calls[row, i, column, j]
                    if calls:
                        fresh = (i not in begun_q, j not in begun_kv)
                        operations.append(self._compute(i, j, calls, fresh))
                        begun_q.add(i)
                        begun_kv.add(j)
                    for parts in later:
                        operations += parts.popleft()
                    later = [parts for parts in later if parts]
                    continue
                if kind == mesh.q_return and index not in begun_q:
                    operations.append(self._neutral_q[index])
                if kind == mesh.kv_return and index not in begun_kv:
                    operations += self._neutral_kv[index]
                now, *rest = self._fragment(f"{kind}-{index}", unit)
                operations += now
                if rest:
                    later.append(deque(rest))
        return operations + [op for parts in later for part in parts for op in part]

    def _compute(
        self, i: int, j: int, calls: tuple[Call, ...], fresh: tuple[bool, bool]
    ) -> Operation:
        key = (i, j, id(calls), *fresh)
        if key not in self._computes:
            self._computes[key] = self._mesh.compute(i, j, calls, *fresh)
        return self._computes[key]

    @cached_property
    def _calls(self) -> _CallTable:
        mesh, lowerings = self._mesh, self._lowerings
        queries = {
            (r, i): lowerings.queries(mesh.q_spans(r, i))
            for r in range(mesh.tile.b)
            for i in range(len(mesh.q_chunks))
        }
        keys = {
            (c, j): lowerings.keys(mesh.kv_spans(c, j))
            for c in range(mesh.tile.a)
            for j in range(len(mesh.kv_chunks))
        }
        return _CallTable(queries, keys, lowerings)

    def _fragment(self, task: str, unit: int) -> list[list[Operation]]:
        """A communication task in parts, each up to a transfer, or what follows the last one.

        Computation runs in program order, so what is computed from a transfer stands behind the
        computation that hides it: after each compute task the next part. Under a memory cap
        there is one part, since its buffers are held until the last.
        """
        mesh = self._mesh
        q_side = task.startswith(("AG-Q", mesh.q_return))
        key = (task, mesh.tile.row(unit) if q_side else mesh.fetch_key(unit))
        if key not in self._fragments:
            operations = fragment(mesh, unit, task)
            self._fragments[key] = [operations] if self.capped else _up_to_transfers(operations)
        return self._fragments[key]


def _up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and is_communication(parts[-1][-1]):
            parts.append([])
        parts[-1].append(op)
    return parts


@dataclass(frozen=True, slots=True)
class _CallTable:
    """Calls of task C-i-j in tile (row, column)."""

    queries: dict[tuple[int, int], Queries]
    keys: dict[tuple[int, int], RowList]
    lowerings: Lowerings

    def __getitem__(self, task: tuple[int, int, int, int]) -> tuple[Call, ...]:
        row, i, column, j = task
        return self.lowerings.calls(self.queries[row, i], self.keys[column, j])
