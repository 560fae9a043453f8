"""The order of what a unit does that gathers queries and keys: the same for all units.

A scheduler orders the tasks. Computation runs in program order, so what is computed from a transfer
stands behind the computation that hides it: a reduction is in parts, each up to a transfer, or what
follows the last one; after each attention comes the next part of each that has begun. Where ranks
exchange tokens for heads (`portions.py`), what a gather needs comes before it, what reductions made
goes behind the last part of all that feed it, and is summed up behind one more attention.
"""

from __future__ import annotations

from collections import Counter, deque

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import Communication, Operation, Task
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.exchange_chunks import SUM, comes_by, goes_by
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.tile_pass import TilePass
from mesh_attention.plan.methods.parts.tile_tasks import (
    CAPPED,
    COMPUTE,
    GATHER_KV,
    GATHER_Q,
    fragment,
)

MOST_STRETCHES = 3


def up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and isinstance(parts[-1][-1], Communication):
            parts.append([])
        parts[-1].append(op)
    return parts


class TileOrder:
    """`tasks` are those of the programs: `RS-Q-0` is the first part of a reduction, `RS-Q-0.1` the
    second. `steps` is the schedule: exchanges are steps of their own, and gathers that have nothing
    else to do are none. `ordered_by`: who found the schedule. Under a memory cap reductions are in
    one part, since their buffers are held until the last."""

    def __init__(self, mesh: TilePass, schedule: Schedule, ordered_by: str) -> None:
        self.in_parts = ordered_by != CAPPED
        self.ordered_by = ordered_by
        self._mesh = mesh
        self._gathers = {GATHER_Q: mesh.tile.a > 1, GATHER_KV: mesh.tile.b > 1}
        self._before: dict[Task, Task] = {}  # the exchange that must come before a gather
        self._feeds: dict[Task, Task] = {}  # the exchange of each reduction
        self._find_exchanges(schedule)
        self._unfinished = Counter(self._feeds.values())
        self._begun: list[deque[Task]] = []  # what is left of each communication
        self._steps: list[tuple[Task | None, list[Task]]] = [(None, [])]
        self.tasks: list[Task] = []
        self._make(schedule)
        self.steps = tuple(Step(task, tuple(c)) for task, c in self._steps if task or c)

    def _find_exchanges(self, schedule: Schedule) -> None:
        mesh, cut, came = self._mesh, self._mesh.head_group.cut, set[Task]()
        for task in schedule.order() if cut else ():
            assert cut is not None
            key_side = task.kind in (GATHER_KV, mesh.kv_reduce_kind)
            if task.kind in self._gathers:
                exchange = comes_by(cut, key_side, *task.index)
                if exchange not in came:
                    self._before[task] = exchange
                    came.add(exchange)
            elif task.kind != COMPUTE:
                self._feeds[task] = goes_by(cut, mesh.direction, key_side, *task.index)

    def _make(self, schedule: Schedule) -> None:
        for step in schedule.steps:
            if step.communication is None:
                self._steps.append((None, []))
            else:
                self._begin(step.communication)
            for task in step.compute:
                self.tasks.append(task)
                self._steps[-1][1].append(task)
                self._begun = [parts for parts in self._begun if parts]
                for parts in self._begun:
                    self._next_part(parts)
        for parts in self._begun:
            while parts:
                self._next_part(parts)

    def _begin(self, task: Task) -> None:
        if task in self._before:
            self._exchange(self._before[task])
        if self._gathers.get(task.kind, True):
            self._steps.append((task, []))
        num_parts = 1
        if self.in_parts and task.kind not in self._gathers:
            num_parts = len(up_to_transfers(fragment(self._mesh, 0, task)))
        self._begun.append(deque([task, *(task.at(f"{part}") for part in range(1, num_parts))]))
        self._next_part(self._begun[-1])

    def _next_part(self, parts: deque[Task]) -> None:
        task = parts.popleft()
        self.tasks.append(task)
        exchange = None if parts else self._feeds.get(task.whole)
        if exchange is not None:
            self._unfinished[exchange] -= 1
            if not self._unfinished[exchange]:
                self._exchange(exchange)
                parts.append(exchange.at(SUM))

    def _exchange(self, task: Task) -> None:
        self.tasks.append(task)
        self._steps.append((task, []))

    def blocks(self, mesh: TilePass, lowerings: Lowerings, unit: int) -> TileBlocks:
        return TileBlocks(mesh, lowerings, unit)


class StretchOrder:
    """Of one uneven share of heads, which takes an attention for each of its stretches
    (`HeadGroup`). `steps` are those of the most that a share can have."""

    in_parts = False

    def __init__(self, mesh: TilePass) -> None:
        kinds = [kind for kind in (mesh.q_reduce_kind, mesh.kv_reduce_kind) if kind]
        steps: list[Step] = []
        for at in range(MOST_STRETCHES):
            steps.append(Step(None, (Task(COMPUTE, (at, at)),)))
            steps += [Step(Task(kind, (at,)), ()) for kind in kinds]
        self.steps = tuple(steps)
        own = len(mesh.q.chunks) * (1 + len(kinds))
        self.tasks = list(Schedule(self.steps[:own]).order())

    def blocks(self, mesh: TilePass, lowerings: Lowerings, unit: int) -> TileBlocks:
        return TileBlocks(mesh, lowerings, unit)


class TileBlocks:
    """The attentions of a unit, of every Q chunk with every KV chunk."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, unit: int) -> None:
        self._mesh, self._lowerings = mesh, lowerings
        self._row, self._column = mesh.tile.row(unit), mesh.tile.column(unit)
        self._begun_q, self._begun_kv = set[int](), set[int]()  # that hold something
        self.buffers: dict[str, Buffer] = {}

    def attend(self, task: Task) -> list[Operation]:
        mesh, lowerings, (i, j) = self._mesh, self._lowerings, task.index
        queries = lowerings.queries(mesh.q.spans(self._row, i))
        calls = lowerings.calls(queries, lowerings.keys(mesh.kv.spans(self._column, j)))
        if not calls:
            return []
        fresh = (i not in self._begun_q, j not in self._begun_kv)
        self._begun_q.add(i)
        self._begun_kv.add(j)
        return [mesh.compute(i, j, calls, fresh)]

    def rotate(self, task: Task) -> list[Operation]:
        raise NotImplementedError("nothing rotates in a tile that is gathered")

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results where a unit has computed none."""
        mesh, (index,) = self._mesh, task.index
        if task.kind == mesh.q_reduce_kind:
            return [] if index in self._begun_q else mesh.q.empty(task.kind, index)
        return [] if index in self._begun_kv else mesh.kv.empty(task.kind, index)
