"""The mesh on one head group: every unit's operations, in the order of its tasks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cached_property

from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.portions import SUM, comes_by, goes_by
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.build.tile_tasks import (
    CAPPED,
    COMPUTE,
    GATHER_KV,
    GATHER_Q,
    buffers_of,
    fragment,
    fragment_key,
)
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.program import Call, Communication, Operation, Task
from mesh_attention.plan.schedule.tasks import Schedule, Step

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
        self._lowerings = lowerings
        self._ordered_by = ordered_by
        self.capped = ordered_by == CAPPED
        alone = mesh.tile.num_ranks == 1 and mesh.head_group.cut is None
        self.hold = 0 if self.capped or alone else HOLD
        self._fragments: dict[tuple[Task, int], list[list[Operation]]] = {}
        self._tasks = schedule.order()
        self._before, self._feeds = self._exchanges()
        self._ordered = schedule

    @cached_property
    def schedule(self) -> Schedule:
        """Asked of one head group for all."""
        return self._with_exchanges(self._ordered)

    @property
    def setting(self) -> dict[str, str]:
        mesh = self._mesh
        return {
            "tile": str(mesh.tile),
            "rotation": "on" if mesh.tile.rotation else "off",
            **mesh.cut_setting,
            "q_reduce": mesh.q.reduce_by.value,
            "kv_reduce": mesh.kv.reduce_by.value if mesh.kv_reduce_kind else "none",
            "scheduler": self._ordered_by,
        }

    def _exchanges(self) -> tuple[dict[Task, Task], dict[Task, Task]]:
        """The exchange that must come before each gather, at the first that needs it; and the
        exchange that each reduction feeds."""
        mesh, cut = self._mesh, self.head_group.cut
        before: dict[Task, Task] = {}  # by the exchange
        feeds: dict[Task, Task] = {}
        for task in self._tasks if cut else ():
            assert cut is not None
            key_side = task.kind in (GATHER_KV, mesh.kv_reduce_kind)
            if task.kind in (GATHER_Q, GATHER_KV):
                before.setdefault(comes_by(cut, key_side, *task.index), task)
            elif task.kind != COMPUTE:
                feeds[task] = goes_by(cut, self.direction, key_side, *task.index)
        return {task: ex for ex, task in before.items()}, feeds

    def _with_exchanges(self, schedule: Schedule) -> Schedule:
        """With exchanges as steps of their own, where programs have them, and without gathers that
        have nothing else to do."""
        if self.head_group.cut is None:
            return schedule
        mesh = self._mesh
        gathers = {GATHER_Q: mesh.tile.a > 1, GATHER_KV: mesh.tile.b > 1}
        steps: list[tuple[Task | None, list[Task]]] = []
        waiting: list[tuple[int, Task]] = []  # for so many computations, as parts of a reduction do
        unfinished = Unfinished(self._feeds)
        for step in schedule.steps:
            task = step.communication
            begun = [self._before[task]] if task in self._before else []
            if task is not None and gathers.get(task.kind, True):
                begun.append(task)
            if task in self._feeds:
                parts = len(self._fragment(task, 0)) - 1
                if parts:
                    waiting.append((parts, task))
                else:
                    begun += unfinished.without(task)
            if begun or task is None or not steps:
                steps += [(one, []) for one in begun] or [(None, [])]
            for compute in step.compute:
                steps[-1][1].append(compute)
                done = [reduction for parts, reduction in waiting if parts == 1]
                steps += [(end, []) for reduction in done for end in unfinished.without(reduction)]
                waiting = [(parts - 1, reduction) for parts, reduction in waiting if parts > 1]
        steps += [(end, []) for _, reduction in waiting for end in unfinished.without(reduction)]
        return Schedule(tuple(Step(task, tuple(c)) for task, c in steps if task or c))

    def unit(self, unit: int) -> Unit:
        return Unit(self._operations(unit), buffers_of(self._mesh, unit))

    def _operations(self, unit: int) -> list[Operation | Task]:
        mesh = self._mesh
        row, column = mesh.tile.row(unit), mesh.tile.column(unit)
        operations: list[Operation | Task] = []
        begun_q: set[int] = set()
        begun_kv: set[int] = set()
        later = _Later(operations, self._feeds)
        for task in self._tasks:
            if task.kind == COMPUTE:
                i, j = task.index
                calls = self._calls_of(row, i, column, j)
                if calls:
                    fresh = (i not in begun_q, j not in begun_kv)
                    operations.append(mesh.compute(i, j, calls, fresh))
                    begun_q.add(i)
                    begun_kv.add(j)
                later.go_on()
                continue
            (index,) = task.index
            if task.kind == mesh.q_reduce_kind and index not in begun_q:
                operations += mesh.q.empty(task.kind, index)
            if task.kind == mesh.kv_reduce_kind and index not in begun_kv:
                operations += mesh.kv.empty(task.kind, index)
            if task in self._before:
                operations.append(self._before[task])
            later.begin(task, self._fragment(task, unit))
        later.finish()
        return operations

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
        key = fragment_key(self._mesh, unit, task)
        if key not in self._fragments:
            operations = fragment(self._mesh, unit, task)
            self._fragments[key] = [operations] if self.capped else _up_to_transfers(operations)
        return self._fragments[key]


class Unfinished:
    """The reductions that each exchange still waits for."""

    def __init__(self, feeds: Mapping[Task, Task]) -> None:
        """`feeds`: the exchange of each reduction."""
        self._feeds, self._left = feeds, Counter(feeds.values())

    def without(self, reduction: Task) -> list[Task]:
        """The exchange that nothing else feeds, now that this reduction is done, if there is one.
        A reduction is done once."""
        exchange = self._feeds.get(reduction)
        if exchange is None or not self._left[exchange]:
            return []
        self._left[exchange] -= 1
        return [] if self._left[exchange] else [exchange]


class _Later:
    """Communication tasks whose parts stand behind the computations that hide them. An exchange
    follows the last part of all that feeds it, and is summed up behind one more computation."""

    def __init__(self, operations: list[Operation | Task], feeds: Mapping[Task, Task]) -> None:
        self._operations, self._unfinished = operations, Unfinished(feeds)
        self._begun: list[tuple[Task, deque[Sequence[Operation | Task]]]] = []

    def begin(self, task: Task, parts: Sequence[Sequence[Operation | Task]]) -> None:
        """With the first part now."""
        self._begun.append((task, deque(parts)))
        self._next_part(*self._begun[-1])

    def go_on(self) -> None:
        """The next part of each."""
        self._begun = [begun for begun in self._begun if begun[1]]
        for begun in self._begun:
            self._next_part(*begun)

    def finish(self) -> None:
        for task, parts in self._begun:
            while parts:
                self._next_part(task, parts)

    def _next_part(self, task: Task, parts: deque[Sequence[Operation | Task]]) -> None:
        self._operations += parts.popleft()
        if not parts:
            for end in self._unfinished.without(task):
                self._operations.append(end)
                parts.append([end.at(SUM)])


def _up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and isinstance(parts[-1][-1], Communication):
            parts.append([])
        parts[-1].append(op)
    return parts
