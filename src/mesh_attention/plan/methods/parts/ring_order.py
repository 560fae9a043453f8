"""The orders of tasks of boxes of which one side rotates, while the other stays.

Each slice of heads, or chunk of keys of it, goes round in a ring of its own, one ring after the
other. The queries of a slice are chunks that meet every block in turn. Steps are numbered through
all rings: `KV-9` brings the block of a step, `C-0-9` is the attention of Q chunk 0 on it, `sent-9`
sends its gradients on, and `end-9` ends the ring that has that step. Where queries rotate, `Q-3`
brings the block of step 3, and `C-3-0` is its attention. `ring_steps.py` has what a unit does in
each task.

The exchange that the next ring needs stands beside the last attention of a ring, when nothing else
travels; that of the next chunk of queries beside the first step of the chunk before; and results
leave beside the attentions that follow.
"""

from __future__ import annotations

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Step
from mesh_attention.plan.methods.parts.exchange import SUM, comes_by, goes_by
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.ring_steps import RingRoute, RingSteps
from mesh_attention.plan.methods.parts.rotate import GradientRoute, deliveries, ring
from mesh_attention.plan.methods.parts.tile_pass import COMPUTE, TilePass
from mesh_attention.plan.methods.parts.tile_side import GATHER_KV, GATHER_Q


class RingOrder:
    """Of keys that rotate: `tasks` of all units in order, and `steps`, which show each transfer
    beside the computation that hides it."""

    in_parts = False  # rotations leave nothing to wait for

    def __init__(self, tiles: TilePass, gradients: GradientRoute, inner: int | None) -> None:
        """`gradients`: how gradients reach their owners; `inner`: units of an inner ring, in a ring
        of rings."""
        self._tiles, self._gradients, self._inner = tiles, gradients, inner
        direct = gradients is GradientRoute.DIRECT and inner is None
        self.route = RingRoute(True, gradients, tiles.kv.per_node if direct else 1)
        self._backward = tiles.direction is Direction.BACKWARD
        self.size = tiles.tile.b
        self._deliveries = deliveries(ring(0, self.size), per_node=self.route.per_node)
        self._num_q, self._num_kv = tiles.q.chunks_of_slice, tiles.kv.chunks_of_slice
        self._came: set[Task] = set()
        self._going: list[Task] = []  # exchanges that wait for the next transfer
        self._sums: list[Task] = []  # what follows them, after an attention
        self.tasks: list[Task] = []
        self.steps: tuple[Step, ...] = ()
        self._make()

    @property
    def setting(self) -> dict[str, str]:
        tiles, words = self._tiles, {"kv": f"rings of {self._inner}" if self._inner else "ring"}
        if len(tiles.q.chunks) + len(tiles.kv.chunks) > 2:
            words |= tiles.cut_setting
        if tiles.tile.a > 1:
            words["q_reduce"] = tiles.q.reduce_by.value
        if self._backward:
            words["gradients"] = self._gradients.value
        return {"tile": str(tiles.tile)} | words

    def unit(self, tiles: TilePass, lowerings: Lowerings, unit: int) -> RingSteps:
        return RingSteps.of(tiles, lowerings, self.route, unit, self._inner)

    def _make(self) -> None:
        if self._tiles.tile.a > 1:
            self._communicate([Task(GATHER_Q, (0,))])
        parts = len(self._tiles.kv.chunks)
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
                self._communicate([Task(self._tiles.q.reduce_kind, (index,))])
                self._goes(index, key_side=False)
        self.tasks.append(Task("sent", (number,)))
        if self._backward:
            sent = [Task("dKV", (part * self.size + d.step,)) for d in self._deliveries[step]]
            self.steps += tuple(Step(task, ()) for task in sent)

    def _comes(self, index: int, *, key_side: bool) -> list[Task]:
        cut = self._tiles.head_group.cut
        if cut is None or (task := comes_by(cut, key_side, index)) in self._came:
            return []
        self._came.add(task)
        return [task]

    def _goes(self, index: int, *, key_side: bool) -> None:
        """A slice that is exchanged at once goes when all of its results are there."""
        cut = self._tiles.head_group.cut
        if cut is None or (self._backward and cut.chunks == (1, 1) and not key_side):
            return
        self._going.append(goes_by(cut, self._tiles.direction, key_side, index))

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
    """Of queries that rotate. `results`: the way of partial results to their owners; None: all at
    the end."""

    in_parts = False  # rotations leave nothing to wait for

    def __init__(self, tiles: TilePass, results: GradientRoute | None) -> None:
        self._tiles, self._results = tiles, results
        per_node = tiles.q.per_node if results is GradientRoute.DIRECT else 1
        self.route = RingRoute(False, results, per_node)
        self.tasks = [Task(GATHER_KV, (0,))]
        steps = [Step(self.tasks[0], ())]
        size = tiles.tile.a
        for step, sent in enumerate(deliveries(ring(0, size), per_node=per_node)):
            following = [Task("Q", (step + 1,))] if step + 1 < size else []
            attend = Task(COMPUTE, (step, 0))
            self.tasks += [*following, attend, Task("sent", (step,))]
            steps.append(Step(following[0] if following else None, (attend,)))
            steps += [Step(Task("O", (delivery.step,)), ()) for delivery in sent if results]
        self.tasks.append(Task("end", (0,)))
        if not results:
            steps.append(Step(Task(tiles.q.reduce_kind, (0,)), ()))
        if tiles.kv.reduce_kind:
            self.tasks.append(Task(tiles.kv.reduce_kind, (0,)))
            steps.append(Step(self.tasks[-1], ()))
        self.steps = tuple(steps)

    @property
    def setting(self) -> dict[str, str]:
        q_reduce = self._results.value if self._results else "all-to-all"
        return {"tile": str(self._tiles.tile), "q": "ring", "q_reduce": q_reduce}

    def unit(self, tiles: TilePass, lowerings: Lowerings, unit: int) -> RingSteps:
        return RingSteps.of(tiles, lowerings, self.route, unit)
