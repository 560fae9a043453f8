"""The tasks of a tile on one head group, and their order.

The order is found once, from costs averaged over all ranks, so every rank derives the same one.
Slices of the heads have the same tasks: they are ordered once, and follow each other. Used by
`box.py`, which turns the order into programs (`task_orders.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import add

from mesh_attention.machine.rates import Costs
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Call, CallKind, Collective, Operation, Task
from mesh_attention.plan.language.tasks import (
    Schedule,
    Step,
    TaskGraph,
    TaskNode,
    follow_each_other,
    one_after_another,
    reduced_early,
)
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.methods.parts.chunks import Chunk
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.tile_pass import COMPUTE, GATHER_KV, GATHER_Q, TilePass
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, join_runs, num_visible
from mesh_attention.plan.problem.spans import slice_spans
from mesh_attention.plan.schedule.greedy import (
    MemoryCapError,
    MemoryModel,
    greedy,
    greedy_capped,
    peak_bytes,
    smallest_cap,
)
from mesh_attention.plan.schedule.search import search

CAPPED = "capped"  # the name of an order under a memory cap


class Scheduler(StrEnum):
    GREEDY = "greedy"
    SEARCH = "search"


def order_tasks(
    mesh: TilePass,
    costs: Costs,
    scheduler: Scheduler,
    *,
    rows: RowRanges,
    gamma: float,
    max_memory_bytes: int | None,
) -> Schedule:
    """`rows`: the keys that queries see; tasks that see nothing are left out."""
    tasks = _present_tasks(mesh, rows)
    largest = max(range(len(mesh.slices)), key=mesh.slices.__getitem__)
    graph = _task_graph(mesh, tasks, costs, [largest])

    def everywhere(schedule: Schedule) -> list[Schedule]:
        return [_of_slice(mesh, schedule, part - largest) for part in range(len(mesh.slices))]

    free = search(graph).schedule if scheduler is Scheduler.SEARCH else greedy(graph, gamma=gamma)
    if mesh.head_group.cut is not None:  # what follows a reduction takes as long as a gather
        free = reduced_early(graph, free)
    if max_memory_bytes is None:
        return follow_each_other(everywhere(free))
    whole = _task_graph(mesh, tasks, costs, range(len(mesh.slices)))
    model, cap = _memory_model(mesh, whole), max_memory_bytes
    if len(mesh.slices) == 1:
        return greedy_capped(whole, model, cap, gamma=gamma)
    # Slices overlap where there is room for two, and otherwise follow one after the other.
    together = follow_each_other(everywhere(free))
    if peak_bytes(model, together.order()) <= cap:
        return together
    of_slice = _memory_model(mesh, graph)
    least = smallest_cap(graph, of_slice)
    for slice_cap in (max(cap, least), least):
        alone = greedy_capped(graph, of_slice, slice_cap, gamma=gamma)
        in_turn = one_after_another(everywhere(alone))
        needed = peak_bytes(model, in_turn.order())
        if needed <= cap:
            return in_turn
    raise MemoryCapError(cap, needed)


def _of_slice(mesh: TilePass, schedule: Schedule, part: int) -> Schedule:
    """The schedule of a slice of heads, for the slice `part` places behind it."""
    num_q, num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice

    def moved(task: Task) -> Task:
        by_q = task.kind in (GATHER_Q, mesh.q_reduce_kind)
        by_chunks = (num_q, num_kv) if task.kind == COMPUTE else (num_q if by_q else num_kv,)
        shifts = (part * chunks for chunks in by_chunks)
        return Task(task.kind, tuple(map(add, task.index, shifts)))

    def step(old: Step) -> Step:
        communication = None if old.communication is None else moved(old.communication)
        return Step(communication, tuple(map(moved, old.compute)))

    return Schedule(tuple(map(step, schedule.steps))) if part else schedule


Pairs = dict[tuple[int, int], int]  # (i, j) -> visible pairs of C-i-j over all ranks


def _present_tasks(mesh: TilePass, rows: RowRanges) -> Pairs:
    """Tasks of a slice of heads with something to do on some rank. Every (Q, KV) partition pair is
    on one rank, so the ranks' work together is all Q chunks i against all KV chunks j."""
    num_q, num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice
    q_runs = [_chunk_runs(mesh.head_group, Kind.Q, chunk) for chunk in mesh.q.chunks[:num_q]]
    kv_runs = [_chunk_runs(mesh.head_group, Kind.K, chunk) for chunk in mesh.kv.chunks[:num_kv]]
    return dict(_num_visible(tuple(map(tuple, q_runs)), tuple(map(tuple, kv_runs)), rows))


@lru_cache(maxsize=256)  # settings of a search, and both passes, have the same chunks
def _num_visible(
    queries: tuple[tuple[Run, ...], ...], keys: tuple[tuple[Run, ...], ...], rows: RowRanges
) -> Pairs:
    """Visible pairs of each pair of chunks that has some."""
    pairs = {
        (i, j): num_visible(q, k, rows) for i, q in enumerate(queries) for j, k in enumerate(keys)
    }
    return {key: count for key, count in pairs.items() if count}


def _chunk_runs(head_group: HeadGroup, kind: Kind, chunk: Chunk) -> Sequence[Run]:
    """Positions of a chunk of all units, as a set."""
    layout = head_group.layout(kind)
    if chunk.size == head_group.size(kind):
        return (Run(0, layout.padded_tokens),)
    if head_group.degree == 1:
        return layout.slot_runs(chunk.start, chunk.stop)
    if head_group.cut is not None:
        slots = head_group.slots(kind)  # the same of every rank
        return [run for span in slots[chunk.index % len(slots)] for run in layout.slot_runs(*span)]
    runs = [
        run
        for unit in range(head_group.num_units)
        for span in slice_spans(head_group.rows(kind, unit), chunk.start, chunk.stop)
        for run in layout.runs(*span)
    ]
    return join_runs(sorted(runs, key=lambda run: run.start))


def _operations(mesh: TilePass, unit: int, task: Task) -> list[Operation]:
    """Operations of a communication task on one unit, without the exchange that it needs."""
    return [op for part in mesh.parts(unit, task) for op in part]


def _task_graph(mesh: TilePass, pairs_of: Pairs, costs: Costs, slices: Sequence[int]) -> TaskGraph:
    num_q, num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice
    tasks = {  # queries meet keys of their own heads only
        (part * num_q + i, part * num_kv + j): (part, pairs)
        for part in slices
        for (i, j), pairs in pairs_of.items()
    }
    computes = {key: Task(COMPUTE, key) for key in tasks}
    communication: list[TaskNode] = []
    groups = {mesh.head_group.group_name(name): of for name, of in mesh.groups().items()}

    def add_tasks(kind: str, chunks: Iterable[int], needs: dict[int, tuple[Task, ...]]) -> None:
        for index in chunks:
            task = Task(kind, (index,))
            seconds = _communication_seconds(mesh, task, costs, groups)
            communication.append(TaskNode(task, seconds, needs.get(index, ())))

    q_indices, kv_indices = (
        [part * count + at for part in slices for at in range(count)] for count in (num_q, num_kv)
    )
    if mesh.kv.is_fetched:
        add_tasks(GATHER_KV, kv_indices, {})
    if mesh.q.is_fetched:
        add_tasks(GATHER_Q, q_indices, {})
    by_q = {i: tuple(n for (x, _), n in computes.items() if x == i) for i in q_indices}
    add_tasks(mesh.q_reduce_kind, q_indices, by_q)
    if mesh.kv_reduce_kind:
        by_kv = {j: tuple(n for (_, y), n in computes.items() if y == j) for j in kv_indices}
        add_tasks(mesh.kv_reduce_kind, kv_indices, by_kv)
    backward = mesh.direction is Direction.BACKWARD
    # Of the heads of a slice, where chunks of queries are cut by heads and not by rows.
    parts_of_slice = len({chunk.heads for chunk in mesh.q.chunks}) // len(mesh.slices)
    compute = []
    for (i, j), (part, pairs) in tasks.items():
        share = mesh.slices[part] / sum(mesh.slices) / mesh.head_group.q_layout.num_ranks
        share /= parts_of_slice
        flops = mesh.problem.flops(pairs, backward=backward) * share
        gathers = [Task(GATHER_Q, (i,))] * mesh.q.is_fetched
        gathers += [Task(GATHER_KV, (j,))] * mesh.kv.is_fetched
        seconds = costs.compute_seconds(flops)
        compute.append(TaskNode(computes[i, j], seconds, tuple(gathers)))
    return TaskGraph(tuple(communication), tuple(compute))


def _communication_seconds(
    mesh: TilePass, task: Task, costs: Costs, groups: Mapping[str, tuple[int, ...]]
) -> float:
    """Mean over all units; with rotation they are all alike."""
    units = range(1 if mesh.tile.rotation else mesh.tile.num_ranks)
    total = 0.0
    for unit in units:
        meter = _meter(mesh, unit)
        for op in _operations(mesh, unit, task):
            if isinstance(op, Collective):
                members = groups[op.group]
                traffic = meter.traffic(op, members.index(unit), len(members))
                total += costs.communication_seconds(traffic.received_bytes)
    return total / len(units) + _exchange_seconds(mesh, task, costs)


@lru_cache(maxsize=8)  # asked for by every task of a pass
def _meter(mesh: TilePass, unit: int) -> TrafficMeter:
    return TrafficMeter(mesh.problem, _buffers(mesh, unit))


def _exchange_seconds(mesh: TilePass, task: Task, costs: Costs) -> float:
    """Of the exchange that precedes a gather, or that follows a reduction."""
    if mesh.head_group.cut is None:
        return 0.0
    side = mesh.q if task.kind in (GATHER_Q, mesh.q_reduce_kind) else mesh.kv
    kinds = side.exchanged if task.kind in (GATHER_Q, GATHER_KV) else side.partials
    local, degree = _local_buffers(mesh, 0), mesh.head_group.degree
    (index,) = task.index
    names = [side.chunks[index].name(mesh.head_group.local(kind)) for kind in kinds]
    moved = sum(local[name].num_bytes(mesh.problem) for name in names) * (degree - 1) / degree
    return costs.communication_seconds(moved)


def _memory_model(mesh: TilePass, graph: TaskGraph) -> MemoryModel:
    """Of a rank on which no task is empty: no other rank needs more."""
    table = _buffers(mesh, 0)
    whole = (Call(CallKind.FULL, 0, 1, 0, 1),)
    touches: dict[Task, tuple[tuple[str, ...], ...]] = {}
    for communication in graph.communication:
        operations = _operations(mesh, 0, communication.task)
        touches[communication.task] = tuple(op.touched for op in operations)
    for compute in graph.compute:
        i, j = compute.index
        op = mesh.compute(i, j, whole, (True, True))
        touches[compute.task] = (op.touched,)
    held = {b.name: b.num_bytes(mesh.problem) for b in table.values() if b.role is Role.WORKSPACE}
    return MemoryModel(
        held,
        {
            task: tuple(tuple(b for b in op if b in held) for op in operations)
            for task, operations in touches.items()
        },
    )


def _buffers(mesh: TilePass, unit: int) -> Mapping[str, Buffer]:
    return {
        **_local_buffers(mesh, unit),
        **mesh.q.buffers(mesh.tile.row(unit)),
        **mesh.kv.buffers(mesh.tile.column(unit)),
        **mesh.stack_buffers(unit),
    }


@lru_cache(maxsize=8)  # asked for by every task of a pass
def _local_buffers(mesh: TilePass, unit: int) -> dict[str, Buffer]:
    """The unit's own rows, for what must be measured before the programs exist. Delta is no input:
    it is computed first, and held until its last chunk is gathered."""
    own = Role.WORKSPACE if mesh.head_group.is_exchanged else Role.INPUT
    sides = (mesh.q, mesh.kv)
    kinds = [kind for side in sides for kind in (*side.inputs, *side.partials)]
    roles = dict.fromkeys(kinds, own)
    if Kind.DELTA in roles:
        roles[Kind.DELTA] = Role.WORKSPACE
    return {
        buffer.name: buffer
        for kind, role in roles.items()
        for buffer in mesh.head_group.local_buffers(kind, unit, role)
    }
