"""The mesh on one strand: its tasks, their order, and every unit's operations in that order.

The order is found once, from costs averaged over all ranks, so every rank derives the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from mesh_attention.plan.buffers import Buffer, Kind, Role
from mesh_attention.plan.chunks import Chunk
from mesh_attention.plan.cost import Costs
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.layout import slice_spans
from mesh_attention.plan.lower import Queries, RowList
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.methods.mesh_pass import MeshPass, OnMesh
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.names import touched
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Call,
    CallKind,
    Operation,
    ReduceScatter,
)
from mesh_attention.plan.runs import Run, visible_pairs
from mesh_attention.plan.schedule import (
    CommunicationTask,
    ComputeTask,
    MemoryModel,
    Schedule,
    TaskGraph,
    greedy,
    greedy_capped,
    search,
)
from mesh_attention.plan.traffic import TrafficMeter

__all__ = ["CAPPED", "MeshInner", "Order", "order_tasks"]

# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1
CAPPED = "capped"  # how an order under a memory cap calls itself


class Order(StrEnum):
    GREEDY = "greedy"
    SEARCH = "search"


def order_tasks(
    mesh: MeshPass, costs: Costs, order: Order, *, gamma: float, max_buffer_bytes: int | None
) -> Schedule:
    graph = _task_graph(mesh, _present_tasks(mesh), costs)
    if max_buffer_bytes is not None:
        return greedy_capped(graph, _memory_model(mesh, graph), max_buffer_bytes, gamma=gamma)
    if order is Order.SEARCH:
        return search(graph).schedule
    return greedy(graph, gamma=gamma)


class MeshInner(OnMesh):
    """What `weave` asks of a method, for the mesh."""

    def __init__(self, mesh: MeshPass, schedule: Schedule, lowerings: Lowerings, ordered_by: str):
        super().__init__(mesh)
        self.schedule = schedule
        self._steps = [[_parts(name) for name in step.tasks()] for step in schedule.steps]
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
        mesh, parts = self._mesh, self._mesh.head_chunks
        return {
            "tile": str(mesh.tile),
            "rotation": "on" if mesh.tile.rotation else "off",
            "chunks": f"{len(mesh.q_chunks) // parts}x{len(mesh.kv_chunks) // parts}",
            **({"head_chunks": str(parts)} if parts > 1 else {}),
            "q_home": mesh.q_route.value,
            "kv_home": mesh.kv_route.value if mesh.kv_return else "none",
            "scheduler": self._ordered_by,
        }

    @property
    def hold(self) -> int:
        alone = self._mesh.tile.num_ranks == 1
        return 0 if self.capped or alone else HOLD

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]:
        return _buffers(self._mesh, unit)

    def unit_operations(self, unit: int) -> Sequence[Operation]:
        mesh = self._mesh
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        operations: list[Operation] = []
        begun_q: set[int] = set()
        begun_kv: set[int] = set()
        later: deque[list[Operation]] = deque()
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
                    if later:
                        operations += later.popleft()
                    continue
                if kind == mesh.q_return and index not in begun_q:
                    operations.append(self._neutral_q[index])
                if kind == mesh.kv_return and index not in begun_kv:
                    operations += self._neutral_kv[index]
                now, *rest = self._fragment(f"{kind}-{index}", unit)
                operations += now
                later += rest
        return operations + [op for part in later for op in part]

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
        computation that hides it: one part after each compute task. Under a memory cap there is one
        part, since its buffers are held until the last.
        """
        mesh = self._mesh
        q_side = task.startswith(("AG-Q", mesh.q_return))
        key = (task, mesh.tile.row(unit) if q_side else mesh.fetch_key(unit))
        if key not in self._fragments:
            operations = _fragment(mesh, unit, task)
            self._fragments[key] = [operations] if self.capped else _up_to_transfers(operations)
        return self._fragments[key]


def _up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and is_communication(parts[-1][-1]):
            parts.append([])
        parts[-1].append(op)
    return parts


def _parts(task: str) -> tuple[str, int]:
    """
    >>> _parts("AG-Q-3"), _parts("C-0-1")
    (('AG-Q', 3), ('C-0', 1))
    """
    kind, _, index = task.rpartition("-")
    return kind, int(index)


@dataclass(frozen=True, slots=True)
class _CallTable:
    """Calls of task C-i-j in tile (row, column)."""

    queries: dict[tuple[int, int], Queries]
    keys: dict[tuple[int, int], RowList]
    lowerings: Lowerings

    def __getitem__(self, task: tuple[int, int, int, int]) -> tuple[Call, ...]:
        row, i, column, j = task
        return self.lowerings.calls(self.queries[row, i], self.keys[column, j])


Pairs = dict[tuple[int, int], int]  # (i, j) -> visible pairs of C-i-j over all ranks


def _present_tasks(mesh: MeshPass) -> Pairs:
    """Tasks with something to do on some rank. Every (Q, KV) partition pair is on one rank, so the
    ranks' work together is all Q chunks i against all KV chunks j."""
    rows = mesh.problem.rows
    num_q, num_kv = (len(c) // mesh.head_chunks for c in (mesh.q_chunks, mesh.kv_chunks))
    q_runs = [_chunk_runs(mesh.strand, Kind.Q, chunk) for chunk in mesh.q_chunks[:num_q]]
    kv_runs = [_chunk_runs(mesh.strand, Kind.K, chunk) for chunk in mesh.kv_chunks[:num_kv]]
    pairs = {
        (i, j): int(visible_pairs(a, b, rows).sum())
        for i, a in enumerate(q_runs)
        for j, b in enumerate(kv_runs)
    }
    return {  # queries meet keys of their own heads only
        (part * num_q + i, part * num_kv + j): count
        for part in range(mesh.head_chunks)
        for (i, j), count in pairs.items()
        if count
    }


def _chunk_runs(strand: Strand, kind: Kind, chunk: Chunk) -> list[Run]:
    """Positions of a chunk of all units, as a set."""
    layout = strand.layout(kind)
    if strand.degree == 1:
        return layout.slot_runs(chunk.start, chunk.stop)
    return [
        run
        for unit in range(strand.num_units)
        for span in slice_spans(strand.rows(kind, unit), chunk.start, chunk.stop)
        for run in layout.runs(*span)
    ]


def _fragment(mesh: MeshPass, unit: int, task: str) -> list[Operation]:
    """Operations of a communication task on one unit."""
    kind, _, index = task.rpartition("-")
    i = int(index)
    row = mesh.tile.row(unit)
    if kind == "AG-Q":
        return [mesh.gather_q(row, i)]
    if kind == "AG-KV":
        return [mesh.fetch_kv(mesh.fetch_key(unit), i)]
    if kind == mesh.q_return:
        return mesh.return_q(i, mesh.q_home(row, i))
    assert kind == mesh.kv_return
    return mesh.return_kv(i, mesh.kv_home(mesh.fetch_key(unit), i))


def _task_graph(mesh: MeshPass, tasks: Pairs, costs: Costs) -> TaskGraph:
    names = {key: f"C-{key[0]}-{key[1]}" for key in tasks}
    communication: list[CommunicationTask] = []

    def add(kind: str, chunks: Iterable[int], needs: dict[int, tuple[str, ...]]) -> None:
        for index in chunks:
            name = f"{kind}-{index}"
            seconds = _communication_seconds(mesh, name, costs)
            communication.append(
                CommunicationTask(name, kind, index, seconds, needs.get(index, ()))
            )

    q_indices, kv_indices = range(len(mesh.q_chunks)), range(len(mesh.kv_chunks))
    if mesh.tile.b > 1:
        add("AG-KV", kv_indices, {})
    if mesh.tile.a > 1:
        add("AG-Q", q_indices, {})
    by_q = {i: tuple(n for (x, _), n in names.items() if x == i) for i in q_indices}
    add(mesh.q_return, q_indices, by_q)
    if mesh.kv_return:
        by_kv = {j: tuple(n for (_, y), n in names.items() if y == j) for j in kv_indices}
        add(mesh.kv_return, kv_indices, by_kv)
    backward = mesh.direction is Direction.BACKWARD
    compute = []
    for (i, j), pairs in tasks.items():
        shares = mesh.strand.q_layout.num_ranks * mesh.head_chunks
        flops = mesh.problem.flops(pairs, backward=backward) / shares
        gathers = (f"AG-Q-{i}",) * (mesh.tile.a > 1) + (f"AG-KV-{j}",) * (mesh.tile.b > 1)
        compute.append(ComputeTask(names[i, j], i, j, costs.compute_seconds(flops), gathers))
    return TaskGraph(tuple(communication), tuple(compute))


def _communication_seconds(mesh: MeshPass, task: str, costs: Costs) -> float:
    """Mean over all units; with rotation they are all alike."""
    units = range(1 if mesh.tile.rotation else mesh.tile.num_ranks)
    groups = mesh.groups()
    total = 0.0
    for unit in units:
        meter = TrafficMeter(mesh.problem, _local_buffers(mesh, unit) | _buffers(mesh, unit))
        for op in _fragment(mesh, unit, task):
            if isinstance(op, AllGather | ReduceScatter | AllToAll):
                members = groups[op.group]
                member = members.index(mesh.strand.rank_of(unit))
                traffic = meter.traffic(op, member, len(members))
                total += costs.communication_seconds(traffic.received_bytes)
    return total / len(units)


def _memory_model(mesh: MeshPass, graph: TaskGraph) -> MemoryModel:
    """Of a rank on which no task is empty: no other rank needs more."""
    table = _local_buffers(mesh, 0) | _buffers(mesh, 0)
    whole = (Call(CallKind.FULL, 0, 1, 0, 1),)
    touches: dict[str, tuple[tuple[str, ...], ...]] = {}
    for communication in graph.communication:
        operations = _fragment(mesh, 0, communication.name)
        touches[communication.name] = tuple(tuple(touched(op)) for op in operations)
    for task in graph.compute:
        op = mesh.compute(task.q_chunk, task.kv_chunk, whole, True, True)
        touches[task.name] = (tuple(touched(op)),)
    held = {b.name: b.num_bytes(mesh.problem) for b in table.values() if b.role is Role.WORKSPACE}
    return MemoryModel(
        held,
        {
            name: tuple(tuple(b for b in op if b in held) for op in operations)
            for name, operations in touches.items()
        },
    )


def _buffers(mesh: MeshPass, unit: int) -> dict[str, Buffer]:
    return {
        **mesh.row_buffers(mesh.tile.row(unit)),
        **mesh.column_buffers(mesh.tile.column(unit)),
        **mesh.stack_buffers(unit),
    }


def _local_buffers(mesh: MeshPass, unit: int) -> dict[str, Buffer]:
    """The unit's own rows, for what must be measured before the programs exist. Delta is nobody's
    input: it is computed first, and held until its last chunk is gathered."""
    roles = dict.fromkeys(Kind, Role.INPUT) | {Kind.DELTA: Role.WORKSPACE}
    return {
        mesh.strand.local(kind): mesh.strand.local_buffer(kind, unit, role)
        for kind, role in roles.items()
    }
