"""The order of what a unit does whose keys rotate, cut or not: the same for all units.

Each slice of heads, or chunk of keys of it, goes round in a ring of its own, one after the other.
The queries of a slice are chunks that meet every block in turn. Where ranks exchange tokens for
heads (`portions.py`), what the next ring needs comes beside the last attention of a ring, when
nothing else travels; the next chunk of queries beside the first step of the chunk before; and what
is done goes beside the attentions that follow.
"""

from __future__ import annotations

from mesh_attention.plan.build.portions import SUM, comes_by, goes_by
from mesh_attention.plan.build.rotate import deliveries, ring
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import Task
from mesh_attention.plan.schedule.tasks import Step


class RingOrder:
    """`tasks` are those of the programs. Steps are numbered through all rings: `KV-9` brings the
    block of a step, `C-0-9` is the attention of Q chunk 0 on it, `sent-9` sends its gradients on,
    and `end-9` ends the ring that has that step. `steps` is the schedule."""

    SENT, END = "sent", "end"

    def __init__(self, mesh: TilePass, per_node: int | None) -> None:
        self._mesh = mesh
        self._backward = mesh.direction is Direction.BACKWARD
        self.size = mesh.tile.b
        self._deliveries = deliveries(ring(0, self.size), per_node)
        self._num_q, self._num_kv = mesh.q.chunks_of_slice, mesh.kv.chunks_of_slice
        self._came: set[Task] = set()
        self._going: list[Task] = []  # exchanges that wait for the next transfer
        self._sums: list[Task] = []  # what follows them, behind an attention
        self.tasks: list[Task] = []
        self.steps: tuple[Step, ...] = ()
        self._make()

    def last_part(self, index: int) -> int:
        """The last ring that a Q chunk meets."""
        return (index // self._num_q + 1) * self._num_kv - 1

    def _make(self) -> None:
        if self._mesh.tile.a > 1:
            self.steps = (Step(Task("AG-Q", (0,)), ()),)
        parts = len(self._mesh.kv.chunks)
        self._communicate([*self._comes(0, key_side=True), *self._comes(0, key_side=False)])
        for part in range(parts):
            for step in range(self.size):
                self._step(part, step, part + 1 == parts)
            self.tasks.append(Task(self.END, (part * self.size,)))
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
            self._attend(Task("C", (index, number)), [*beside, *self._going])
            if step == self.size - 1 and in_slice == self._num_kv - 1:
                self._communicate([Task(self._mesh.q_reduce_kind, (index,))])
                self._goes(index, key_side=False)
        self.tasks.append(Task(self.SENT, (number,)))
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
        self.steps += tuple(Step(one, ()) for one in beside[:-1])
        self.steps += (Step(beside[-1] if beside else None, (task,)),)
