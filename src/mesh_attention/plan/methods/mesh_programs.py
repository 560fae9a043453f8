"""Scheduling a mesh pass and writing the programs of all ranks.

The order is found once, from costs averaged over all ranks, so every rank derives the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from mesh_attention.plan.assemble import assemble, touched
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.cost import Costs
from mesh_attention.plan.layout import Layout, Spans
from mesh_attention.plan.lower import Queries, RowList, lower
from mesh_attention.plan.mask import RowRanges
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.plan import Direction, Pass
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Call,
    CallKind,
    Free,
    Operation,
    Program,
    ReduceScatter,
)
from mesh_attention.plan.runs import visible_pairs
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

__all__ = ["Lowerings", "Order", "build_pass"]


class Order(StrEnum):
    GREEDY = "greedy"
    SEARCH = "search"


class Lowerings:
    """Kernel calls of every task, each worked out once: both passes often ask for the same."""

    def __init__(self, q_layout: Layout, kv_layout: Layout, rows: RowRanges) -> None:
        self._q_layout = q_layout
        self._kv_layout = kv_layout
        self._rows = rows
        self._queries: dict[Spans, Queries] = {}
        self._keys: dict[Spans, RowList] = {}
        self._calls: dict[tuple[int, int], tuple[Call, ...]] = {}
        self._equal: dict[tuple[Call, ...], tuple[Call, ...]] = {}

    def queries(self, spans: Spans) -> Queries:
        if spans not in self._queries:
            self._queries[spans] = Queries.of(RowList.of(self._q_layout, spans), self._rows)
        return self._queries[spans]

    def keys(self, spans: Spans) -> RowList:
        if spans not in self._keys:
            self._keys[spans] = RowList.of(self._kv_layout, spans)
        return self._keys[spans]

    def calls(self, q: Queries, k: RowList) -> tuple[Call, ...]:
        """Equal calls are the same object, so that tasks can be told apart by its id."""
        key = (id(q), id(k))  # both live as long as this object
        found = self._calls.get(key)
        if found is None:
            calls = lower(q, k)
            found = self._calls[key] = self._equal.setdefault(calls, calls)
        return found


def build_pass(
    mesh: MeshPass,
    lowerings: Lowerings,
    costs: Costs,
    order: Order,
    *,
    gamma: float,
    max_buffer_bytes: int | None,
) -> Pass:
    tasks = _present_tasks(mesh)
    graph = _task_graph(mesh, tasks, costs)
    if max_buffer_bytes is not None:
        schedule = greedy_capped(graph, _memory_model(mesh, graph), max_buffer_bytes, gamma=gamma)
    elif order is Order.SEARCH:
        schedule = search(graph).schedule
    else:
        schedule = greedy(graph, gamma=gamma)
    return Pass(
        mesh.direction,
        mesh.groups(),
        tuple(_programs(mesh, schedule, lowerings)),
        schedule,
        {
            "tile": str(mesh.tile),
            "rotation": "on" if mesh.tile.rotation else "off",
            "chunks": f"{len(mesh.q_chunks)}x{len(mesh.kv_chunks)}",
            "q_home": mesh.q_route.value,
            "kv_home": mesh.kv_route.value if mesh.kv_return else "none",
            "scheduler": "capped" if max_buffer_bytes is not None else order.value,
        },
    )


Pairs = dict[tuple[int, int], int]  # (i, j) -> visible pairs of C-i-j over all ranks


def _present_tasks(mesh: MeshPass) -> Pairs:
    """Tasks with something to do on some rank. Every (Q, KV) partition pair is on one rank, so the
    ranks' work together is all Q chunks i against all KV chunks j."""
    q, kv, rows = mesh.q_layout, mesh.kv_layout, mesh.problem.rows
    q_runs = [q.slot_runs(c.start, c.stop) for c in mesh.q_chunks]
    kv_runs = [kv.slot_runs(c.start, c.stop) for c in mesh.kv_chunks]
    pairs = {
        (i, j): int(visible_pairs(a, b, rows).sum())
        for i, a in enumerate(q_runs)
        for j, b in enumerate(kv_runs)
    }
    return {key: count for key, count in pairs.items() if count}


def _fragment(mesh: MeshPass, rank: int, task: str) -> list[Operation]:
    """Operations of a communication task on one rank."""
    kind, _, index = task.rpartition("-")
    i = int(index)
    row = mesh.tile.row(rank)
    if kind == "AG-Q":
        return [mesh.gather_q(row, i)]
    if kind == "AG-KV":
        return [mesh.fetch_kv(mesh.fetch_key(rank), i)]
    if kind == mesh.q_return:
        return mesh.return_q(i, mesh.q_home(row, i))
    assert kind == mesh.kv_return
    return mesh.return_kv(i, mesh.kv_home(mesh.fetch_key(rank), i))


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
        flops = mesh.problem.flops(pairs, backward=backward) / mesh.tile.num_ranks
        gathers = (f"AG-Q-{i}",) * (mesh.tile.a > 1) + (f"AG-KV-{j}",) * (mesh.tile.b > 1)
        compute.append(ComputeTask(names[i, j], i, j, costs.compute_seconds(flops), gathers))
    return TaskGraph(tuple(communication), tuple(compute))


def _communication_seconds(mesh: MeshPass, task: str, costs: Costs) -> float:
    """Mean over all ranks; with rotation they are all alike."""
    ranks = range(1 if mesh.tile.rotation else mesh.tile.num_ranks)
    groups = mesh.groups()
    meter = TrafficMeter(mesh.problem)
    total = 0.0
    for rank in ranks:
        table = _buffers(mesh, rank)
        for op in _fragment(mesh, rank, task):
            if isinstance(op, AllGather | ReduceScatter | AllToAll):
                members = groups[op.group]
                traffic = meter.traffic(op, members.index(rank), len(members), table)
                total += costs.communication_seconds(traffic.received_bytes)
    return total / len(ranks)


def _memory_model(mesh: MeshPass, graph: TaskGraph) -> MemoryModel:
    """Of a rank on which no task is empty: no other rank needs more."""
    table = _buffers(mesh, 0)
    whole = (Call(CallKind.FULL, 0, 1, 0, 1),)
    touches: dict[str, tuple[tuple[str, ...], ...]] = {}
    for communication in graph.communication:
        operations = _fragment(mesh, 0, communication.name)
        touches[communication.name] = tuple(tuple(touched(op)) for op in operations)
    for task in graph.compute:
        op = mesh.compute(task.q_chunk, task.kv_chunk, whole, True, True)
        touches[task.name] = (tuple(touched(op)),)
    held = {
        b.name: b.num_bytes(mesh.problem) for b in table.values() if b.role.value == "workspace"
    }
    return MemoryModel(
        held,
        {
            name: tuple(tuple(b for b in op if b in held) for op in operations)
            for name, operations in touches.items()
        },
    )


def _buffers(mesh: MeshPass, rank: int) -> dict[str, Buffer]:
    return {
        **mesh.local_buffers(rank),
        **mesh.row_buffers(mesh.tile.row(rank)),
        **mesh.column_buffers(mesh.tile.column(rank)),
        **mesh.stack_buffers(rank),
    }


def _programs(mesh: MeshPass, schedule: Schedule, lowerings: Lowerings) -> Iterable[Program]:
    order = schedule.order()
    tile = mesh.tile
    fragments: dict[tuple[object, ...], list[Operation]] = {}
    computes: dict[tuple[object, ...], Operation] = {}
    touches: dict[int, list[str]] = {}
    frees: dict[tuple[str, ...], Free] = {}
    prologue = mesh.prologue()
    neutral_q = [mesh.empty_q(i) for i in range(len(mesh.q_chunks))]
    neutral_kv = [mesh.empty_kv(j) for j in range(len(mesh.kv_chunks))] if mesh.kv_return else []

    def fragment(task: str, rank: int) -> list[Operation]:
        q_side = task.startswith(("AG-Q", mesh.q_return))
        key = (task, tile.row(rank) if q_side else mesh.fetch_key(rank))
        if key not in fragments:
            fragments[key] = _fragment(mesh, rank, task)
        return fragments[key]

    q_lists = {
        (r, i): lowerings.queries(mesh.q_spans(r, i))
        for r in range(tile.b)
        for i in range(len(mesh.q_chunks))
    }
    kv_lists = {
        (c, j): lowerings.keys(mesh.kv_spans(c, j))
        for c in range(tile.a)
        for j in range(len(mesh.kv_chunks))
    }
    for rank in range(tile.num_ranks):
        row, column = tile.row(rank), tile.column(rank)
        operations: list[Operation] = list(prologue)
        begun_q: set[int] = set()
        begun_kv: set[int] = set()
        for task in order:
            kind, _, last = task.rpartition("-")
            index = int(last)
            if not task.startswith("C-"):
                if kind == mesh.q_return and index not in begun_q:
                    operations.append(neutral_q[index])
                if kind == mesh.kv_return and index not in begun_kv:
                    operations += neutral_kv[index]
                operations += fragment(task, rank)
                continue
            i, j = int(kind[2:]), index
            calls = lowerings.calls(q_lists[row, i], kv_lists[column, j])
            if not calls:
                continue
            fresh = (i not in begun_q, j not in begun_kv)
            key = (i, j, id(calls), *fresh)
            if key not in computes:
                computes[key] = mesh.compute(i, j, calls, *fresh)
            operations.append(computes[key])
            begun_q.add(i)
            begun_kv.add(j)
        for op in operations:
            if id(op) not in touches:
                touches[id(op)] = touched(op)
        yield assemble(rank, operations, _buffers(mesh, rank), touches, frees)
