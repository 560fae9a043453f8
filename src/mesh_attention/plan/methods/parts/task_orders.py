"""The orders of the tasks of a box: in which order a unit gathers, computes, rotates and reduces.

An order depends on what the sides of a box do, and is the same for all units. `tasks` is the order
of the programs; `steps` is the schedule, which shows transfers beside the computation that hides
them; `in_parts` says whether reductions are split at their transfers. Where ranks exchange tokens
for heads chunk by chunk (`exchange.py`), an order also says where each exchange stands. `box.py`
chooses an order and turns its tasks into operations; an order makes no operation itself.
"""

from __future__ import annotations

from collections import Counter, deque

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.exchange import SUM, comes_by, goes_by
from mesh_attention.plan.methods.parts.rotate import GradientRoute, deliveries, ring
from mesh_attention.plan.methods.parts.tile_pass import COMPUTE, TilePass
from mesh_attention.plan.methods.parts.tile_side import GATHER_KV, GATHER_Q
from mesh_attention.plan.methods.parts.tile_tasks import CAPPED

MOST_ATTENTIONS = 3  # of an uneven share of heads


class TileOrder:
    """Queries and keys are gathered, in the order of a scheduler (`ordered_by`).

    Computation runs in program order, so a computation that needs a transfer stands after the
    computation that hides the transfer. A reduction is in parts, each up to a transfer: `RS-Q-0` is
    the first part, `RS-Q-0.1` the second. After each attention comes the next part of every
    reduction that has begun. Under a memory cap reductions are in one part, since their buffers are
    held until the last. An exchange comes before the gather that needs it, or after the last part
    of all reductions that feed it; its sums follow one attention later.
    """

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
            key_side = task.kind in (GATHER_KV, mesh.kv.reduce_kind)
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
            num_parts = len(self._mesh.parts(0, task))
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


class UnevenOrder:
    """The order of one uneven share of heads, which takes one attention for each of its ranges of
    uniform heads (`HeadGroup.uniform_heads`). `steps` are those of the most that a share can have.
    """

    in_parts = False

    def __init__(self, mesh: TilePass) -> None:
        kinds = [kind for kind in (mesh.q.reduce_kind, mesh.kv.reduce_kind) if kind]
        steps: list[Step] = []
        for at in range(MOST_ATTENTIONS):
            steps.append(Step(None, (Task(COMPUTE, (at, at)),)))
            steps += [Step(Task(kind, (at,)), ()) for kind in kinds]
        self.steps = tuple(steps)
        own = len(mesh.q.chunks) * (1 + len(kinds))
        self.tasks = list(Schedule(self.steps[:own]).order())


class RingOrder:
    """Keys rotate, and queries stay.

    Each slice of heads, or chunk of keys of it, goes round in a ring of its own, one ring after the
    other. The queries of a slice are chunks that meet every block in turn. Steps are numbered
    through all rings: `KV-9` brings the block of a step, `C-0-9` is the attention of Q chunk 0 on
    it, `sent-9` sends its gradients on, and `end-9` ends the ring that has that step.

    The exchange that the next ring needs stands beside the last attention of a ring, when nothing
    else travels; that of the next chunk of queries beside the first step of the chunk before; and
    results leave beside the attentions that follow. `gradients`: how gradients reach their owners;
    `inner`: units of an inner ring, in a ring of rings.
    """

    in_parts = False  # rotations leave nothing to wait for

    def __init__(self, mesh: TilePass, gradients: GradientRoute, inner: int | None) -> None:
        self._mesh = mesh
        self.gradients, self.inner = gradients, inner
        direct = gradients is GradientRoute.DIRECT and inner is None
        self.per_node = mesh.kv.in_node if direct else None
        self.shared: dict[object, list[Operation]] = {}
        self._backward = mesh.direction is Direction.BACKWARD
        self.size = mesh.tile.b
        self._deliveries = deliveries(ring(0, self.size), self.per_node)
        self._num_q, self._num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice
        self._came: set[Task] = set()
        self._going: list[Task] = []  # exchanges that wait for the next transfer
        self._sums: list[Task] = []  # what follows them, after an attention
        self.tasks: list[Task] = []
        self.steps: tuple[Step, ...] = ()
        self._make()

    def last_part(self, index: int) -> int:
        """The last ring that a Q chunk meets."""
        return (index // self._num_q + 1) * self._num_kv - 1

    def _make(self) -> None:
        if self._mesh.tile.a > 1:
            self._communicate([Task(GATHER_Q, (0,))])
        parts = len(self._mesh.kv.chunks)
        self._communicate([*self._comes(0, key_side=True), *self._comes(0, key_side=False)])
        for part in range(parts):
            for step in range(self.size):
                self._step(part, step, part + 1 == parts)
            self.tasks.append(Task("end", (part * self.size,)))
            if self._backward:
                self._goes(part, key_side=True)
        self._communicate(self._going)
        self.tasks += [*self._sums, *(task.at(SUM) for task in self._going)]

    def _step(self, part: int, step: int, last_part: bool) -> None:
        in_slice = part % self._num_kv
        first = part // self._num_kv * self._num_q
        queries = range(first, first + self._num_q)
        number = part * self.size + step
        for index in queries:
            beside: list[Task] = []
            if step == in_slice == 0 and index + 1 in queries:
                beside += self._comes(index + 1, key_side=False)
            if step == self.size - 1 and index == queries[-1] and not last_part:
                beside += self._comes(part + 1, key_side=True)
                if in_slice == self._num_kv - 1:
                    beside += self._comes(queries.stop, key_side=False)
            if index == first and step + 1 < self.size:
                beside.append(Task("KV", (number + 1,)))
            self._attend(Task(COMPUTE, (index, number)), [*beside, *self._going])
            if step == self.size - 1 and in_slice == self._num_kv - 1:
                self._communicate([Task(self._mesh.q.reduce_kind, (index,))])
                self._goes(index, key_side=False)
        self.tasks.append(Task("sent", (number,)))
        if self._backward:
            sent = [Task("dKV", (part * self.size + d.step,)) for d in self._deliveries[step]]
            self.steps += tuple(Step(task, ()) for task in sent)

    def _comes(self, index: int, *, key_side: bool) -> list[Task]:
        cut = self._mesh.head_group.cut
        if cut is None or (task := comes_by(cut, key_side, index)) in self._came:
            return []
        self._came.add(task)
        return [task]

    def _goes(self, index: int, *, key_side: bool) -> None:
        """A slice that is exchanged at once goes when all of its results are there."""
        cut = self._mesh.head_group.cut
        if cut is None or (self._backward and cut.chunks == (1, 1) and not key_side):
            return
        self._going.append(goes_by(cut, self._mesh.direction, key_side, index))

    def _communicate(self, tasks: list[Task]) -> None:
        self.tasks += tasks
        self.steps += tuple(Step(task, ()) for task in tasks)

    def _attend(self, task: Task, beside: list[Task]) -> None:
        sums, self._sums = self._sums, [going.at(SUM) for going in self._going]
        self._going = []
        self.tasks += [*beside, task, *sums]
        self.steps += tuple(Step(transfer, ()) for transfer in beside[:-1])
        self.steps += (Step(beside[-1] if beside else None, (task,)),)


class QueryOrder:
    """Queries rotate, and keys stay: `Q-3` brings the block of a step, `C-3-0` is its attention,
    `sent-3` sends its results on. `results`: how partial results reach their owners; None: all at
    the end."""

    in_parts = False

    def __init__(self, mesh: TilePass, results: GradientRoute | None) -> None:
        self.results = results
        self.per_node = mesh.q.in_node if results is GradientRoute.DIRECT else None
        self.tasks = [Task(GATHER_KV, (0,))]
        steps = [Step(self.tasks[0], ())]
        size = mesh.tile.a
        for step, sent in enumerate(deliveries(ring(0, size), self.per_node)):
            following = [Task("Q", (step + 1,))] if step + 1 < size else []
            attention = Task(COMPUTE, (step, 0))
            self.tasks += [*following, attention, Task("sent", (step,))]
            steps.append(Step(following[0] if following else None, (attention,)))
            steps += [Step(Task("O", (delivery.step,)), ()) for delivery in sent if results]
        self.tasks.append(Task("end", (0,)))
        if not results:
            steps.append(Step(Task(mesh.q.reduce_kind, (0,)), ()))
        if mesh.kv.reduce_kind:
            self.tasks.append(Task(mesh.kv.reduce_kind, (0,)))
            steps.append(Step(self.tasks[-1], ()))
        self.steps = tuple(steps)
