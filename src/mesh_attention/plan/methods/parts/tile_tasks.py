"""The tasks of a tile on one head group, and their order.

The order is found once, from costs averaged over all ranks, so every rank derives the same one.
Slices of the heads have the same tasks: they are ordered once, and follow each other. Used by
`box.py`; `tile_order.py` turns the order into programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
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
from mesh_attention.plan.methods.parts.greedy import (
    MemoryCapError,
    MemoryModel,
    greedy,
    greedy_capped,
    peak_bytes,
    smallest_cap,
)
from mesh_attention.plan.methods.parts.lower import COMPUTE
from mesh_attention.plan.methods.parts.tile_plan import TilePass
from mesh_attention.plan.methods.parts.tile_side import TileSide
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, join_runs, num_visible
from mesh_attention.plan.problem.spans import slice_spans

GREEDY, CAPPED = "greedy", "capped"  # names of orders: the second is one under a memory cap


def order_tasks(
    tiles: TilePass, costs: Costs, *, rows: RowRanges, gamma: float, max_memory_bytes: int | None
) -> Schedule:
    """`rows`: the keys that queries see; tasks that see nothing are left out."""
    pairs_of = _num_visible(_chunks_of(tiles.q), _chunks_of(tiles.kv), rows)
    largest = max(range(len(tiles.slices)), key=tiles.slices.__getitem__)
    graph = _task_graph(tiles, pairs_of, costs, [largest])

    def everywhere(schedule: Schedule) -> list[Schedule]:
        return [_of_slice(tiles, schedule, part - largest) for part in range(len(tiles.slices))]

    free = greedy(graph, gamma=gamma)
    if tiles.head_group.cut is not None:  # what follows a reduction takes as long as a gather
        free = reduced_early(graph, free)
    if max_memory_bytes is None:
        return follow_each_other(everywhere(free))
    whole = _task_graph(tiles, pairs_of, costs, range(len(tiles.slices)))
    model, cap = _memory_model(tiles, whole), max_memory_bytes
    if len(tiles.slices) == 1:
        return greedy_capped(whole, model, cap, gamma=gamma)
    # Slices overlap where there is room for two, and otherwise follow one after the other.
    together = follow_each_other(everywhere(free))
    if peak_bytes(model, together.order()) <= cap:
        return together
    of_slice = _memory_model(tiles, graph)
    least = smallest_cap(graph, of_slice)
    for slice_cap in (max(cap, least), least):
        alone = greedy_capped(graph, of_slice, slice_cap, gamma=gamma)
        in_turn = one_after_another(everywhere(alone))
        needed = peak_bytes(model, in_turn.order())
        if needed <= cap:
            return in_turn
    raise MemoryCapError(cap, needed)


def _of_slice(tiles: TilePass, schedule: Schedule, part: int) -> Schedule:
    """The schedule of a slice of heads, for the slice `part` places behind it."""
    if not part:
        return schedule

    def moved(task: Task) -> Task:
        sides = (tiles.q, tiles.kv) if task.kind == COMPUTE else (tiles.side_of[task.kind],)
        shifts = [part * side.chunks_of_slice for side in sides]
        return Task(task.kind, tuple(map(add, task.index, shifts)))

    return Schedule(
        tuple(
            Step(step.communication and moved(step.communication), tuple(map(moved, step.compute)))
            for step in schedule.steps
        )
    )


Pairs = dict[tuple[int, int], int]  # (i, j) -> visible pairs of C-i-j over all ranks


@lru_cache(maxsize=256)  # settings of a search, and both passes, have the same chunks
def _num_visible(
    queries: tuple[tuple[Run, ...], ...], keys: tuple[tuple[Run, ...], ...], rows: RowRanges
) -> Pairs:
    """Visible pairs of each pair of chunks that has some. Every (Q, KV) partition pair is on one
    rank, so the work of all ranks together is all chunks of queries against all of keys."""
    pairs = {
        (i, j): num_visible(q, k, rows) for i, q in enumerate(queries) for j, k in enumerate(keys)
    }
    return {key: count for key, count in pairs.items() if count}


@lru_cache(maxsize=32)
def _chunks_of(side: TileSide) -> tuple[tuple[Run, ...], ...]:
    """Positions of each chunk of a slice."""
    return tuple([tuple(_runs(side, at)) for at in range(side.chunks_of_slice)])


def _runs(side: TileSide, index: int) -> Sequence[Run]:
    """Positions of a chunk of all units, as a set."""
    group, chunk = side.head_group, side.chunks[index]
    layout = side.own.layout
    if chunk.size == side.own.size:
        return (Run(0, layout.padded_tokens),)
    if group.degree == 1:
        return layout.slot_runs(chunk.start, chunk.stop)
    if group.cut is not None:
        slots = side.own.slots  # the same of every rank
        return [run for span in slots[chunk.index % len(slots)] for run in layout.slot_runs(*span)]
    runs = [
        run
        for unit in range(group.num_units)
        for span in slice_spans(side.own_rows(unit), chunk.start, chunk.stop)
        for run in layout.runs(*span)
    ]
    return join_runs(sorted(runs, key=lambda run: run.start))


def _task_graph(tiles: TilePass, pairs_of: Pairs, costs: Costs, slices: Sequence[int]) -> TaskGraph:
    computes = {  # queries meet keys of their own heads only
        (part * tiles.q.chunks_of_slice + i, part * tiles.kv.chunks_of_slice + j): (part, pairs)
        for part in slices
        for (i, j), pairs in pairs_of.items()
    }
    seconds = _seconds(tiles, costs)
    communication: list[TaskNode] = []

    def add_tasks(side: TileSide, kind: str, needs_of: Mapping[int, list[Task]]) -> None:
        count = side.chunks_of_slice
        for index in [part * count + at for part in slices for at in range(count)]:
            task = Task(kind, (index,))
            needs = tuple(needs_of.get(index, ()))
            communication.append(TaskNode(task, seconds(task), needs))

    fetched = [side for side in (tiles.q, tiles.kv) if side.is_fetched]
    for side in reversed(fetched):
        add_tasks(side, side.gather_kind, {})
    for axis, side in enumerate((tiles.q, tiles.kv)):
        feeding: dict[int, list[Task]] = {}
        for key in computes if side.reduce_kind else ():
            feeding.setdefault(key[axis], []).append(Task(COMPUTE, key))
        if side.reduce_kind:
            add_tasks(side, side.reduce_kind, feeding)
    # Of the heads of a slice, where chunks of queries are cut by heads and not by rows.
    parts_of_slice = len({chunk.heads for chunk in tiles.q.chunks}) // len(tiles.slices)
    compute = []
    for key, (part, pairs) in computes.items():
        share = tiles.slices[part] / sum(tiles.slices) / tiles.head_group.q_layout.num_ranks
        share /= parts_of_slice
        flops = tiles.problem.flops(pairs, backward=tiles.direction is Direction.BACKWARD) * share
        index_of = dict(zip((tiles.q, tiles.kv), key, strict=True))
        needs = tuple([Task(side.gather_kind, (index_of[side],)) for side in fetched])
        compute.append(TaskNode(Task(COMPUTE, key), costs.compute_seconds(flops), needs))
    return TaskGraph(tuple(communication), tuple(compute))


@lru_cache(maxsize=16)  # of both passes, for all masks
def _seconds(tiles: TilePass, costs: Costs) -> Callable[[Task], float]:
    """Seconds of communication tasks, with the exchange that precedes a gather or that follows a
    reduction: means over all units, which with rotation are all alike."""
    units, group = range(1 if tiles.tile.rotation else tiles.tile.num_ranks), tiles.head_group
    tables = [_buffers(tiles, unit) for unit in units]
    meters = [TrafficMeter(tiles.problem, table) for table in tables]
    groups = {group.group_name(name): members for name, members in tiles.groups.items()}

    def of_exchange(task: Task) -> float:
        if group.cut is None:
            return 0.0
        side, (index,) = tiles.side_of[task.kind], task.index
        kinds = side.exchanged if task.kind == side.gather_kind else side.partials
        names = [side.chunks[index].name(group.local(kind)) for kind in kinds]
        held = sum(tables[0][name].num_bytes(group.problem) for name in names)
        return costs.communication_seconds(held * (group.degree - 1) / group.degree)

    @cache
    def seconds(task: Task) -> float:
        total = 0.0
        for unit, meter in zip(units, meters, strict=True):
            for op in _operations(tiles, unit, task):
                if isinstance(op, Collective):
                    members = groups[op.group]
                    traffic = meter.traffic(op, members.index(unit), len(members))
                    total += costs.communication_seconds(traffic.received_bytes)
        return total / len(units) + of_exchange(task)

    return seconds


def _operations(tiles: TilePass, unit: int, task: Task) -> list[Operation]:
    """Operations of a communication task on one unit, without the exchange that it needs."""
    return [op for part in tiles.parts(unit, task) for op in part]


def _memory_model(tiles: TilePass, graph: TaskGraph) -> MemoryModel:
    """Of a rank on which no task is empty: no other rank needs more."""
    whole, nothing = (Call(CallKind.FULL, 0, 1, 0, 1),), (True, True)
    operations = {node.task: _operations(tiles, 0, node.task) for node in graph.communication}
    operations |= {node.task: [tiles.attend(node.task, whole, nothing)] for node in graph.compute}
    buffers = [b for b in _buffers(tiles, 0).values() if b.role is Role.WORKSPACE]
    held = {buffer.name: buffer.num_bytes(tiles.problem) for buffer in buffers}
    touches = {
        task: tuple(tuple(name for name in op.touched if name in held) for op in of_task)
        for task, of_task in operations.items()
    }
    return MemoryModel(held, touches)


def _buffers(tiles: TilePass, unit: int) -> dict[str, Buffer]:
    """All buffers of a unit, for what must be measured before the programs exist. Delta is no
    input: it is computed first, and held until its last chunk is gathered."""
    group = tiles.head_group
    own = Role.WORKSPACE if group.is_exchanged else Role.INPUT
    kinds = [kind for side in (tiles.q, tiles.kv) for kind in (*side.inputs, *side.partials)]
    roles = {kind: Role.WORKSPACE if kind is Kind.DELTA else own for kind in kinds}
    local = [x for kind, role in roles.items() for x in group.local_buffers(kind, unit, role)]
    return {buffer.name: buffer for buffer in local} | tiles.buffers(unit)
