"""The tasks of a mesh on one strand, and their order.

The order is found once, from costs averaged over all ranks, so every rank derives the same one.
Slices of the heads have the same tasks: they are ordered once, and follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from mesh_attention.plan.buffers import Buffer, Kind, Role
from mesh_attention.plan.chunks import Chunk
from mesh_attention.plan.cost import Costs
from mesh_attention.plan.layout import slice_spans
from mesh_attention.plan.methods.mesh_pass import MeshPass
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
    MemoryCapError,
    MemoryModel,
    Schedule,
    Step,
    TaskGraph,
    follow_each_other,
    greedy,
    greedy_capped,
    one_after_another,
    peak_bytes,
    search,
    smallest_cap,
)
from mesh_attention.plan.traffic import TrafficMeter

__all__ = ["CAPPED", "Order", "buffers_of", "fragment", "order_tasks", "parts_of"]

CAPPED = "capped"  # how an order under a memory cap calls itself


class Order(StrEnum):
    GREEDY = "greedy"
    SEARCH = "search"


def order_tasks(
    mesh: MeshPass, costs: Costs, order: Order, *, gamma: float, max_buffer_bytes: int | None
) -> Schedule:
    tasks = _present_tasks(mesh)
    largest = max(range(len(mesh.slices)), key=mesh.slices.__getitem__)
    graph = _task_graph(mesh, tasks, costs, [largest])

    def everywhere(found: Schedule) -> list[Schedule]:
        return [_of_slice(mesh, found, part - largest) for part in range(len(mesh.slices))]

    free = search(graph).schedule if order is Order.SEARCH else greedy(graph, gamma=gamma)
    if max_buffer_bytes is None:
        return follow_each_other(everywhere(free))
    whole = _task_graph(mesh, tasks, costs, range(len(mesh.slices)))
    model, cap = _memory_model(mesh, whole), max_buffer_bytes
    if len(mesh.slices) == 1:
        return greedy_capped(whole, model, cap, gamma=gamma)
    # Slices that help each other where there is room for two, and otherwise one after the other.
    together = follow_each_other(everywhere(free))
    if peak_bytes(model, together.order()) <= cap:
        return together
    of_slice = _memory_model(mesh, graph)
    least = smallest_cap(graph, of_slice)
    for tried in (max(cap, least), least):
        alone = greedy_capped(graph, of_slice, tried, gamma=gamma)
        in_turn = one_after_another(everywhere(alone))
        needed = peak_bytes(model, in_turn.order())
        if needed <= cap:
            return in_turn
    raise MemoryCapError(cap, needed)


def _of_slice(mesh: MeshPass, found: Schedule, part: int) -> Schedule:
    """The schedule of a slice of heads, for the one so many places behind it."""
    num_q, num_kv = mesh.chunks_of_slice

    def name(task: str) -> str:
        kind, index = parts_of(task)
        if kind.startswith("C-"):
            return f"C-{int(kind[2:]) + part * num_q}-{index + part * num_kv}"
        on_q = kind in ("AG-Q", mesh.q_return)
        return f"{kind}-{index + part * (num_q if on_q else num_kv)}"

    def step(old: Step) -> Step:
        communication = None if old.communication is None else name(old.communication)
        return Step(communication, tuple(map(name, old.compute)))

    return Schedule(tuple(map(step, found.steps))) if part else found


def parts_of(task: str) -> tuple[str, int]:
    """
    >>> parts_of("AG-Q-3"), parts_of("C-0-1")
    (('AG-Q', 3), ('C-0', 1))
    """
    kind, _, index = task.rpartition("-")
    return kind, int(index)


Pairs = dict[tuple[int, int], int]  # (i, j) -> visible pairs of C-i-j over all ranks


def _present_tasks(mesh: MeshPass) -> Pairs:
    """Tasks of a slice of heads with something to do on some rank. Every (Q, KV) partition pair is
    on one rank, so the ranks' work together is all Q chunks i against all KV chunks j."""
    rows = mesh.problem.rows
    num_q, num_kv = mesh.chunks_of_slice
    q_runs = [_chunk_runs(mesh.strand, Kind.Q, chunk) for chunk in mesh.q_chunks[:num_q]]
    kv_runs = [_chunk_runs(mesh.strand, Kind.K, chunk) for chunk in mesh.kv_chunks[:num_kv]]
    pairs = {
        (i, j): int(visible_pairs(a, b, rows).sum())
        for i, a in enumerate(q_runs)
        for j, b in enumerate(kv_runs)
    }
    return {key: count for key, count in pairs.items() if count}


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


def fragment(mesh: MeshPass, unit: int, task: str) -> list[Operation]:
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


def _task_graph(mesh: MeshPass, pairs_of: Pairs, costs: Costs, slices: Sequence[int]) -> TaskGraph:
    num_q, num_kv = mesh.chunks_of_slice
    tasks = {  # queries meet keys of their own heads only
        (part * num_q + i, part * num_kv + j): (part, pairs)
        for part in slices
        for (i, j), pairs in pairs_of.items()
    }
    names = {key: f"C-{key[0]}-{key[1]}" for key in tasks}
    communication: list[CommunicationTask] = []

    def add(kind: str, chunks: Iterable[int], needs: dict[int, tuple[str, ...]]) -> None:
        for index in chunks:
            name = f"{kind}-{index}"
            seconds = _communication_seconds(mesh, name, costs)
            communication.append(
                CommunicationTask(name, kind, index, seconds, needs.get(index, ()))
            )

    q_indices, kv_indices = (
        [part * count + at for part in slices for at in range(count)] for count in (num_q, num_kv)
    )
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
    for (i, j), (part, pairs) in tasks.items():
        share = mesh.slices[part] / sum(mesh.slices) / mesh.strand.q_layout.num_ranks
        flops = mesh.problem.flops(pairs, backward=backward) * share
        gathers = (f"AG-Q-{i}",) * (mesh.tile.a > 1) + (f"AG-KV-{j}",) * (mesh.tile.b > 1)
        compute.append(ComputeTask(names[i, j], i, j, costs.compute_seconds(flops), gathers))
    return TaskGraph(tuple(communication), tuple(compute))


def _communication_seconds(mesh: MeshPass, task: str, costs: Costs) -> float:
    """Mean over all units; with rotation they are all alike."""
    units = range(1 if mesh.tile.rotation else mesh.tile.num_ranks)
    groups = mesh.groups()
    total = 0.0
    for unit in units:
        meter = TrafficMeter(mesh.problem, _local_buffers(mesh, unit) | buffers_of(mesh, unit))
        for op in fragment(mesh, unit, task):
            if isinstance(op, AllGather | ReduceScatter | AllToAll):
                members = groups[op.group]
                member = members.index(mesh.strand.rank_of(unit))
                traffic = meter.traffic(op, member, len(members))
                total += costs.communication_seconds(traffic.received_bytes)
    return total / len(units)


def _memory_model(mesh: MeshPass, graph: TaskGraph) -> MemoryModel:
    """Of a rank on which no task is empty: no other rank needs more."""
    table = _local_buffers(mesh, 0) | buffers_of(mesh, 0)
    whole = (Call(CallKind.FULL, 0, 1, 0, 1),)
    touches: dict[str, tuple[tuple[str, ...], ...]] = {}
    for communication in graph.communication:
        operations = fragment(mesh, 0, communication.name)
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


def buffers_of(mesh: MeshPass, unit: int) -> dict[str, Buffer]:
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
