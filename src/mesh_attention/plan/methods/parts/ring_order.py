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

from mesh_attention.plan.language.program import Task
from mesh_attention.plan.language.tasks import Step
from mesh_attention.plan.methods.parts.exchange import SUM, comes_by, goes_by
from mesh_attention.plan.methods.parts.lower import COMPUTE, Lowerings
from mesh_attention.plan.methods.parts.ring_steps import RingRoute, RingSteps
from mesh_attention.plan.methods.parts.rotate import GradientRoute, deliveries, ring
from mesh_attention.plan.methods.parts.tile_plan import TilePass


class RingOrder:
    """`tasks` of all units in order, and `steps`, which show each transfer beside the computation
    that hides it. Results of queries leave when all that stays has met all blocks."""

    in_parts = False  # rotations leave nothing to wait for

    def __init__(
        self, tiles: TilePass, keys: bool, results: GradientRoute | None, inner: int | None
    ) -> None:
        """`keys`: keys rotate, and not queries; `results`: how results of blocks reach their
        owners, None: all at the end; `inner`: units of an inner ring, in a ring of rings."""
        self._tiles, self._inner = tiles, inner
        side = tiles.kv if keys else tiles.q
        direct = results is GradientRoute.DIRECT and inner is None
        self._route = RingRoute(keys, results, side.per_node if direct else 1)
        self._moving, self._staying = self._route.sides(tiles)
        self._size = self._moving.size
        self._deliveries = deliveries(ring(0, self._size), per_node=self._route.per_node)
        self._came: set[Task] = set()
        self._going: list[Task] = []  # exchanges that wait for the next transfer
        self._sums: list[Task] = []  # what follows them, after an attention
        self.tasks: list[Task] = []
        self.steps: tuple[Step, ...] = ()
        self._make()

    @property
    def setting(self) -> dict[str, str]:
        tiles, results = self._tiles, self._route.results
        words = {"tile": str(tiles.tile)}
        if not self._route.keys:
            return words | {"q": "ring", "q_reduce": results.value if results else "all-to-all"}
        words["kv"] = f"rings of {self._inner}" if self._inner else "ring"
        if len(tiles.q.chunks) + len(tiles.kv.chunks) > 2:
            words |= tiles.cut_setting
        if tiles.tile.a > 1:
            words["q_reduce"] = tiles.q.reduce_by.value
        if self._moving.partials and results:
            words["gradients"] = results.value
        return words

    def unit(self, tiles: TilePass, lowerings: Lowerings, unit: int) -> RingSteps:
        return RingSteps.of(tiles, lowerings, self._route, unit, self._inner)

    def _make(self) -> None:
        if self._staying.size > 1:
            self._communicate([Task(self._staying.gather_kind, (0,))])
        parts = len(self._moving.chunks)
        self._communicate([*self._comes(0, key_side=True), *self._comes(0, key_side=False)])
        for part in range(parts):
            for step in range(self._size):
                self._step(part, step, part + 1 == parts)
            self.tasks.append(Task("end", (part * self._size,)))
            if self._moving.partials:
                self._goes(part, key_side=True)
        if not self._route.results:
            self.steps += (Step(Task(self._moving.reduce_kind, (0,)), ()),)
        if not self._route.keys and self._staying.reduce_kind:
            self._communicate([Task(self._staying.reduce_kind, (0,))])
        self._communicate(self._going)
        self.tasks += [*self._sums, *(task.at(SUM) for task in self._going)]

    def _step(self, part: int, step: int, last_part: bool) -> None:
        keys, per_slice = self._route.keys, self._moving.chunks_of_slice
        in_slice, count = part % per_slice, self._staying.chunks_of_slice
        first = part // per_slice * count
        chunks = range(first, first + count)
        number = part * self._size + step
        for index in chunks:
            beside: list[Task] = []
            if step == in_slice == 0 and index + 1 in chunks:
                beside += self._comes(index + 1, key_side=False)
            if step == self._size - 1 and index == chunks[-1] and not last_part:
                beside += self._comes(part + 1, key_side=True)
                if in_slice == per_slice - 1:
                    beside += self._comes(chunks.stop, key_side=False)
            if index == first and step + 1 < self._size:
                beside.append(Task("KV" if keys else "Q", (number + 1,)))
            attend = Task(COMPUTE, (index, number) if keys else (number, index))
            self._attend(attend, [*beside, *self._going])
            if keys and step == self._size - 1 and in_slice == per_slice - 1:
                self._communicate([Task(self._staying.reduce_kind, (index,))])
                self._goes(index, key_side=False)
        self.tasks.append(Task("sent", (number,)))
        if self._moving.partials and self._route.results:
            kind, first = "dKV" if keys else "O", part * self._size
            sent = [Task(kind, (first + delivery.step,)) for delivery in self._deliveries[step]]
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
        at_once = self._moving.partials and cut is not None and cut.chunks == (1, 1)
        if cut is not None and (key_side or not at_once):
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
