"""The mesh on one head group: every unit's operations, in the order of its tasks."""

from __future__ import annotations

from collections import deque

from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.reduce import ReduceBy
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.build.tile_tasks import CAPPED, COMPUTE, GATHER_Q, buffers_of, fragment
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.program import Call, Communication, Operation, Task
from mesh_attention.plan.schedule.tasks import Schedule

# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1


class TileBuilder:
    """What methods that stand on a tile answer alike when `with_exchanges` asks."""

    hold = 0  # what rotates has two buffers, and goes when its attention is done

    def __init__(self, mesh: TilePass) -> None:
        self._mesh = mesh
        self.head_group = mesh.head_group
        self.direction = mesh.direction
        self.needs = (*mesh.q.inputs, *mesh.kv.inputs)

    def groups(self) -> dict[str, tuple[int, ...]]:
        return self._mesh.groups()


class MeshBuilder(TileBuilder):
    """The mesh."""

    def __init__(self, mesh: TilePass, schedule: Schedule, lowerings: Lowerings, ordered_by: str):
        super().__init__(mesh)
        self.schedule = schedule
        self._lowerings = lowerings
        self._ordered_by = ordered_by
        self.capped = ordered_by == CAPPED
        self.hold = 0 if self.capped or mesh.tile.num_ranks == 1 else HOLD
        self._fragments: dict[tuple[Task, int], list[list[Operation]]] = {}
        self._tasks = schedule.order()

    @property
    def setting(self) -> dict[str, str]:
        mesh = self._mesh
        num_q, num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice
        return {
            "tile": str(mesh.tile),
            "rotation": "on" if mesh.tile.rotation else "off",
            "chunks": f"{num_q}x{num_kv}",
            **({"head_slices": "+".join(map(str, mesh.slices))} if len(mesh.slices) > 1 else {}),
            "q_reduce": mesh.q.reduce_by.value,
            "kv_reduce": mesh.kv.reduce_by.value if mesh.kv_reduce_kind else "none",
            "scheduler": self._ordered_by,
        }

    def unit(self, unit: int) -> Unit:
        return Unit(self._operations(unit), buffers_of(self._mesh, unit))

    def _operations(self, unit: int) -> list[Operation]:
        mesh = self._mesh
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        operations: list[Operation] = []
        begun_q: set[int] = set()
        begun_kv: set[int] = set()
        later: list[deque[list[Operation]]] = []  # parts of the tasks that have begun
        for task in self._tasks:
            if task.kind == COMPUTE:
                i, j = task.index
                calls = self._calls_of(row, i, column, j)
                if calls:
                    fresh = (i not in begun_q, j not in begun_kv)
                    operations.append(mesh.compute(i, j, calls, fresh))
                    begun_q.add(i)
                    begun_kv.add(j)
                for parts in later:
                    operations += parts.popleft()
                later = [parts for parts in later if parts]
                continue
            (index,) = task.index
            if task.kind == mesh.q_reduce_kind and index not in begun_q:
                operations += mesh.q.empty(task.kind, index)
            if task.kind == mesh.kv_reduce_kind and index not in begun_kv:
                operations += mesh.kv.empty(task.kind, index)
            now, *rest = self._fragment(task, unit)
            operations += now
            if rest:
                later.append(deque(rest))
        return operations + [op for parts in later for part in parts for op in part]

    def _calls_of(self, row: int, i: int, column: int, j: int) -> tuple[Call, ...]:
        mesh, lowerings = self._mesh, self._lowerings
        queries = lowerings.queries(mesh.q.spans(row, i))
        return lowerings.calls(queries, lowerings.keys(mesh.kv.spans(column, j)))

    def _fragment(self, task: Task, unit: int) -> list[list[Operation]]:
        """A communication task in parts, each up to a transfer, or what follows the last one.

        Computation runs in program order, so what is computed from a transfer stands behind the
        computation that hides it: after each compute task the next part. Under a memory cap
        there is one part, since its buffers are held until the last.
        """
        mesh = self._mesh
        q_side = task.kind in (GATHER_Q, mesh.q_reduce_kind)
        key = (task, mesh.tile.row(unit) if q_side else mesh.fetch_key(unit))
        kinds = {mesh.q_reduce_kind: mesh.q.reduce_by, mesh.kv_reduce_kind: mesh.kv.reduce_by}
        if kinds.get(task.kind) is ReduceBy.NODES:
            key = (task, unit)
        if key not in self._fragments:
            operations = fragment(mesh, unit, task)
            self._fragments[key] = [operations] if self.capped else _up_to_transfers(operations)
        return self._fragments[key]


def _up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and isinstance(parts[-1][-1], Communication):
            parts.append([])
        parts[-1].append(op)
    return parts
