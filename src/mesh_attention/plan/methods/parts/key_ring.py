"""Keys that rotate: the steps of Ring-Attention and of what is made of it (algorithm.md, 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV after them,
direct or travelling (`rotate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, SendRecv, Task
from mesh_attention.plan.language.tasks import Step
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.rotate import Reach, Rotation, deliveries, hop, ring
from mesh_attention.plan.methods.parts.tile_pass import Pair, Pieces, TilePass
from mesh_attention.plan.problem.spans import Spans

_KEYS, _GRADS = (Kind.K, Kind.V), (Kind.GRAD_K, Kind.GRAD_V)
_EMPTY = Task("C", stage="empty")


@lru_cache(maxsize=1 << 14)
def _pair(k: str, v: str, rows: int) -> Pair:
    """Members call what they hold at a step by the same names, so they share these pieces."""
    return Piece(k, 0, rows), Piece(v, 0, rows)


class KeyRing:
    """The steps of one member, whose queries are those of a tile row.

    `blocks(member)` gives the rows of a member's block, `own` the pieces of the first one, and
    `results` where the gradients of the own block go; `per_node` members are in a node, one after
    the other. Members share all operations but transfers (`shared`), or a ring of n, which has n^2
    steps, would take long to plan and to read.

    Where heads or keys are cut each part goes round in a ring of its own: this is that of KV chunk
    `part`. Its steps, and what they are called by, are counted on from those of the parts before.
    `begun`: the Q chunks whose accumulators hold something.
    """

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        row: int,
        group: str,
        rotation: Rotation,
        blocks: Callable[[int], Spans],
        own: Pair,
        results: Pair,
        gradients: Reach,
        shared: dict[object, list[Operation]],
        per_node: int | None = None,
        *,
        part: int = 0,
        begun: set[int] | None = None,
    ) -> None:
        self._mesh = mesh
        self._group = group
        first, last = mesh.head_group.heads(Kind.K)
        heads = mesh.kv.chunks[part].heads or (0, last - first)
        self._heads = first + heads[0], first + heads[1]
        self._shared = shared
        self._rotation = rotation
        self._first_step = part * rotation.size
        self._own, self._results = own, results
        self._travels = gradients is Reach.TRAVEL
        self._deliveries = deliveries(rotation, per_node)
        self._begun = {0}  # steps whose gradients hold parts of others, or the own
        self._own_begun = False
        self._begun_q = set[int]() if begun is None else begun
        self._rows = [blocks(member) for member in rotation.blocks]
        self._block_rows = sum(stop - start for start, stop in self._rows[0])
        num_q = mesh.q.chunks_of_slice
        of_slice = part // mesh.kv.chunks_of_slice * num_q
        self.queries = range(of_slice, of_slice + num_q)  # the Q chunks that it meets
        keys = [lowerings.keys(rows) for rows in self._rows]
        seen = {i: lowerings.queries(mesh.q.spans(row, i)) for i in self.queries}
        self._calls = {i: [lowerings.calls(seen[i], rows) for rows in keys] for i in self.queries}
        self._backward = mesh.direction is Direction.BACKWARD
        self.buffers: dict[str, Buffer] = {}

    @property
    def size(self) -> int:
        return self._rotation.size

    def operations(self) -> list[Operation]:
        """All of it, one after the other."""
        operations: list[Operation] = []
        for step in range(self.size):
            operations += self.hop(step + 1)
            for index in self.queries:
                operations += self.attention(index, step)
            operations += self.send_on(step)
        for index in self.queries:
            operations += self.empty(index)
        return operations + self.end()

    def hop(self, step: int) -> list[Operation]:
        """The block of a step, if there is one."""
        if step == self.size:
            return []
        self._declare(self._keys(step), _KEYS, step)
        task = Task("KV", (self._number(step),))
        return [hop(task, self._group, self._rotation, step, self._keys)]

    def attention(self, index: int, step: int) -> list[Operation]:
        """Of a Q chunk and the block of a step."""
        mesh, calls, begun = self._mesh, self._calls[index][step], index in self._begun_q
        sums: Pieces = self._pair(f"{self._number(step)}") if self._backward else ()
        if self._backward:
            self._declare(sums, _GRADS, step, Precision.ACCUMULATE)
        if not calls:
            return []
        # The own gradients hold nothing before the first attention on them.
        first = step not in self._begun or (step == 0 and not self._own_begun)
        key: object = (index, self._number(step), self._own, calls, begun, first)
        if key not in self._shared:
            task, fresh = Task("C", (index, self._number(step))), (not begun, first)
            q_sums = mesh.q.sums(index)
            operands = (mesh.queries(index), self._keys(step), q_sums + sums, calls, fresh)
            self._shared[key] = [mesh.attention(task, *operands)]
        self._begun_q.add(index)
        self._begun.add(step)
        self._own_begun |= step == 0
        return self._shared[key]

    def send_on(self, step: int) -> list[Operation]:
        """Gradients of the keys of a step, once all queries have met them."""
        if not self._backward:
            return []
        send = self._pass_on if self._travels else self._deliver
        return send(step) if step else self._empty_own()

    def empty(self, index: int) -> list[Operation]:
        """Neutral results of queries that have seen nothing."""
        if index in self._begun_q:
            return []
        self._begun_q.add(index)
        return [Merge(_EMPTY, self._mesh.merge_rule, (), self._mesh.q.sums(index))]

    def end(self) -> list[Operation]:
        return self._end() if self._backward else []

    def _number(self, step: int) -> int:
        """Of a step of this part among those of all."""
        return self._first_step + step

    def _pair(self, suffix: str) -> Pair:
        """Gradients: `3` of step 3, `3.wire` as they travel, `back` as they arrive, ..."""
        return _pair(f"grad_k.{suffix}", f"grad_v.{suffix}", self._block_rows)

    def _keys(self, step: int) -> Pair:
        number = self._number(step)
        return _pair(f"k.{number}", f"v.{number}", self._block_rows) if step else self._own

    def _declare(
        self,
        pieces: Pieces,
        kinds: tuple[Kind, Kind],
        step: int,
        precision: Precision = Precision.ELEMENT,
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows = self._rows[step]
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, rows, self._heads, precision)

    def _empty_own(self) -> list[Operation]:
        if self._own_begun:
            return []
        totals = self._pair(f"{self._number(0)}")
        return [Merge(_EMPTY, MergeRule.SUM, (), (total,)) for total in totals]

    def _pass_on(self, step: int) -> list[Operation]:
        """This member's part of the gradients of a step's block, with the sum that came along."""
        way, last = self._rotation.hops[0], step == self._rotation.size - 1
        number = self._number(step)
        suffix, arrives = (f"back{number}", 0) if last else (f"{number + 1}.sofar", step + 1)
        parts = [self._pair(f"{number}")] * (step in self._begun)
        parts += [self._pair(f"{number}.sofar")] * (step > 1)
        return self._send(step, parts, way.to_member, way.from_member, suffix, arrives)

    def _deliver(self, step: int) -> list[Operation]:
        operations: list[Operation] = []
        for of, to_member, from_member, block in self._deliveries[step]:
            number = self._number(of)
            parts = [self._pair(f"{number}")] * (of in self._begun)
            operations += self._send(of, parts, to_member, from_member, f"back{number}", block)
            operations += self._arrived(of, block)
        return operations

    def _send(
        self, step: int, parts: list[Pair], to: int, source: int, suffix: str, arrives: int
    ) -> list[Operation]:
        """The sum of the parts of a step's block; what comes is of the block of step `arrives`."""
        number = self._number(step)
        task = Task("dKV", (number,))
        outgoing, incoming = self._pair(f"{number}.wire"), self._pair(suffix)
        self._declare(outgoing, _GRADS, step)
        self._declare(incoming, _GRADS, arrives)
        key = ("sum", number, len(parts))
        if key not in self._shared:
            self._shared[key] = [
                Merge(task.at("sum"), MergeRule.SUM, tuple(pair[side] for pair in parts), (wire,))
                for side, wire in enumerate(outgoing)
            ]
        transfer = SendRecv(task, self._group, to, outgoing, source, incoming)
        return [*self._shared[key], transfer]

    def _arrived(self, step: int, block: int) -> list[Operation]:
        """What came is added to the gradients of the block of that step."""
        number = self._number(step)
        totals, incoming = self._pair(f"{self._number(block)}"), self._pair(f"back{number}")
        self._declare(totals, _GRADS, block, Precision.ACCUMULATE)
        task, begun = Task("dKV", (number,), "arrived"), block in self._begun
        self._begun.add(block)
        return [
            Merge(task, MergeRule.SUM, (total, part) if begun else (part,), (total,))
            for total, part in zip(totals, incoming, strict=True)
        ]

    def _end(self) -> list[Operation]:
        """The owner's total, and what travelled."""
        own, last = self._number(0), self._number(self.size - 1)
        came = [self._pair(f"back{last}")] * (self._travels and self.size > 1)
        return [
            Merge(
                Task("dKV", stage="end"),
                MergeRule.SUM,
                tuple(pair[side] for pair in (self._pair(f"{own}"), *came)),
                (result,),
            )
            for side, result in enumerate(self._results)
        ]


def rotating_schedule(size: int, *, backward: bool, per_node: int | None = None) -> list[Step]:
    """Transfers beside the computation they hide behind."""
    steps: list[Step] = []
    for step, back in enumerate(deliveries(ring(0, size), per_node)):
        following = Task("KV", (step + 1,)) if step + 1 < size else None
        steps.append(Step(following, (Task("C", (0, step)),)))
        steps += [Step(Task("dKV", (one.step,)), ()) for one in back if backward]
    return steps
