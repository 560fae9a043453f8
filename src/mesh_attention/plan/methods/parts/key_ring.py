"""Keys that rotate: the steps of Ring-Attention and of methods made of it (algorithm.md, 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV after them,
direct or with their block (`rotate.py`). `KeyRing` makes the operations of one member of one ring,
`KeyRings` those of a unit of a box, which has a ring for each KV chunk. StarTrail uses `KeyRing`.
"""

from __future__ import annotations

from functools import lru_cache

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, SendRecv, Task
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.rotate import GradientRoute, Rotation, deliveries, hop, ring
from mesh_attention.plan.methods.parts.task_orders import RingOrder
from mesh_attention.plan.methods.parts.tile_pass import Pair, Pieces, TilePass, attention
from mesh_attention.plan.problem.spans import Spans

Kinds = tuple[Kind, ...]
_KEYS, _GRADS = (Kind.K, Kind.V), (Kind.GRAD_K, Kind.GRAD_V)
_EMPTY = Task("C", stage="empty")


@lru_cache(maxsize=1 << 14)
def _pair(k: str, v: str, rows: int) -> Pair:
    """Members use the same names for what they hold at a step, so they share these pieces."""
    return Piece(k, 0, rows), Piece(v, 0, rows)


class KeyRing:
    """The steps of one member, whose queries are those of a tile row.

    `rows` are the rows of the block of each step, `own` the pieces of the first block, and
    `results` the pieces for the gradients of the own block; `per_node` members follow each other in
    a node. Members share all operations but transfers (`shared`): a ring of n has n^2 steps, which
    would take long to plan and to read.

    Where heads or keys are cut, each KV chunk (`part`) goes round in a ring of its own. Its steps,
    and the names of their buffers, are numbered on from those of the parts before. `begun`: the Q
    chunks whose accumulators hold something.
    """

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        row: int,
        group: str,
        rotation: Rotation,
        rows: list[Spans],
        own: Pair,
        results: Pair,
        gradients: GradientRoute,
        shared: dict[object, list[Operation]],
        per_node: int | None = None,
        *,
        part: int = 0,
        begun: set[int] | None = None,
    ) -> None:
        self._mesh, self._group, self._rotation, self._rows = mesh, group, rotation, rows
        self._own, self._results, self._shared = own, results, shared
        self._heads = mesh.head_group.heads_of(mesh.kv.chunks[part], Kind.K)
        self.size = rotation.size
        self._first_step = part * self.size
        self._travels = gradients is GradientRoute.TRAVEL
        self._deliveries = deliveries(rotation, per_node)
        self._begun = {0}  # steps whose gradients hold parts of others, or the own
        self._own_begun = False
        self._begun_q = set[int]() if begun is None else begun
        self._block_rows = sum(stop - start for start, stop in rows[0])
        num_q = mesh.q.chunks_of_slice
        of_slice = part // mesh.kv.chunks_of_slice * num_q
        self.queries = range(of_slice, of_slice + num_q)  # the Q chunks that it meets
        keys = [lowerings.keys(spans) for spans in rows]
        queries = {i: lowerings.queries(mesh.q.spans(row, i)) for i in self.queries}
        self._calls = {
            i: [lowerings.calls(queries[i], block) for block in keys] for i in self.queries
        }
        self._backward = mesh.direction is Direction.BACKWARD
        self.buffers: dict[str, Buffer] = {}

    def operations(self) -> list[Operation]:
        """All operations of a ring that is not part of a larger order."""
        operations: list[Operation] = []
        for step in range(self.size):
            operations += self.hop(step + 1)
            for index in self.queries:
                operations += self.attend(index, step)
            operations += self.send_on(step)
        for index in self.queries:
            operations += self.empty(index)
        return operations + self.end()

    def hop(self, step: int) -> list[Operation]:
        """The transfer of the block of a step, if there is such a step."""
        if step == self.size:
            return []
        self._declare(self._keys(step), _KEYS, step)
        task = Task("KV", (self._number(step),))
        return [hop(task, self._group, self._rotation, step, self._keys)]

    def attend(self, index: int, step: int) -> list[Operation]:
        """The attention of a Q chunk and the block of a step."""
        mesh, calls, begun = self._mesh, self._calls[index][step], index in self._begun_q
        number = self._number(step)
        sums: Pieces = self._pair(f"{number}") if self._backward else ()
        if self._backward:
            self._declare(sums, _GRADS, step, Precision.ACCUMULATE)
        if not calls:
            return []
        # The own gradients hold nothing before the first attention on them.
        first = step not in self._begun or (step == 0 and not self._own_begun)
        key: object = (index, number, self._own, calls, begun, first)
        if key not in self._shared:
            task, totals = Task("C", (index, number)), mesh.q.sums(index) + sums
            operands = (mesh.q.pieces(index), self._keys(step), totals)
            self._shared[key] = [attention(task, *operands, calls, (not begun, first))]
        self._begun_q.add(index)
        self._begun.add(step)
        self._own_begun |= step == 0
        return self._shared[key]

    def send_on(self, step: int) -> list[Operation]:
        """Gradients of the keys of a step, once all queries have met them."""
        if not self._backward:
            return []
        if step:
            return self._pass_on(step) if self._travels else self._deliver(step)
        if self._own_begun:
            return []
        totals = self._pair(f"{self._number(0)}")
        return [Merge(_EMPTY, MergeRule.SUM, (), (total,)) for total in totals]

    def empty(self, index: int) -> list[Operation]:
        """Neutral results of queries that have seen nothing."""
        if index in self._begun_q:
            return []
        self._begun_q.add(index)
        return [Merge(_EMPTY, self._mesh.q.merge_rule, (), self._mesh.q.sums(index))]

    def end(self) -> list[Operation]:
        """The owner's total, with the sum that travelled."""
        if not self._backward:
            return []
        parts = [self._pair(f"{self._number(0)}")]
        if self._travels and self.size > 1:
            parts.append(self._pair(f"back{self._number(self.size - 1)}"))
        task = Task("dKV", stage="end")
        return [
            Merge(task, MergeRule.SUM, tuple(pair[side] for pair in parts), (result,))
            for side, result in enumerate(self._results)
        ]

    def _number(self, step: int) -> int:
        """The number of a step of this part among the steps of all parts."""
        return self._first_step + step

    def _pair(self, suffix: str) -> Pair:
        """Gradients: `3` of step 3, `3.wire` as they are sent, `back` as they arrive, ..."""
        return _pair(f"grad_k.{suffix}", f"grad_v.{suffix}", self._block_rows)

    def _keys(self, step: int) -> Pair:
        number = self._number(step)
        return _pair(f"k.{number}", f"v.{number}", self._block_rows) if step else self._own

    def _declare(
        self, pieces: Pieces, kinds: Kinds, step: int, precision: Precision = Precision.ELEMENT
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._heads
        for piece, kind in zip(pieces, kinds, strict=True):
            self.buffers[piece.buffer] = Buffer(piece.buffer, kind, rows, heads, precision)

    def _pass_on(self, step: int) -> list[Operation]:
        """This member's part of the gradients of a step's block, with the sum that came with it."""
        way, last = self._rotation.hops[0], step == self.size - 1
        number = self._number(step)
        suffix, arrives = (f"back{number}", 0) if last else (f"{number + 1}.sofar", step + 1)
        parts = [self._pair(f"{number}")] * (step in self._begun)
        parts += [self._pair(f"{number}.sofar")] * (step > 1)
        return self._send(step, parts, way.to_member, way.from_member, suffix, arrives)

    def _deliver(self, step: int) -> list[Operation]:
        operations: list[Operation] = []
        for sent, to_member, from_member, arrives in self._deliveries[step]:
            number = self._number(sent)
            parts = [self._pair(f"{number}")] * (sent in self._begun)
            operations += self._send(sent, parts, to_member, from_member, f"back{number}", arrives)
            operations += self._add(sent, arrives)
        return operations

    def _send(
        self, step: int, parts: list[Pair], to: int, source: int, suffix: str, arrives: int
    ) -> list[Operation]:
        """Sends the sum of the parts of a step's block; what comes belongs to the block of step
        `arrives`."""
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

    def _add(self, step: int, block: int) -> list[Operation]:
        """Adds what came to the gradients of the block of that step."""
        number = self._number(step)
        totals, incoming = self._pair(f"{self._number(block)}"), self._pair(f"back{number}")
        self._declare(totals, _GRADS, block, Precision.ACCUMULATE)
        task, begun = Task("dKV", (number,), "arrived"), block in self._begun
        self._begun.add(block)
        return [
            Merge(task, MergeRule.SUM, (total, part) if begun else (part,), (total,))
            for total, part in zip(totals, incoming, strict=True)
        ]


class KeyRings:
    """What one unit of a box does: its part in the ring of each KV chunk."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, unit: int, order: RingOrder) -> None:
        self._order = order
        tile, local = mesh.tile, mesh.head_group.local
        members = tile.kv_group(tile.column(unit))
        place, size, begun = members.index(unit), len(members), set[int]()
        rotation = ring(place, size, order.inner)
        self._rings: list[KeyRing] = []
        for part, chunk in enumerate(mesh.kv.chunks):
            k, v, grad_k, grad_v = (chunk.local(local(kind)) for kind in (*_KEYS, *_GRADS))
            key_ring = KeyRing(
                mesh,
                lowerings,
                tile.row(unit),
                mesh.kv.group(tile.column(unit)),
                rotation,
                [mesh.kv.rows_of((members[member],), part) for member in rotation.blocks],
                own=(k, v),
                results=(grad_k, grad_v),
                gradients=order.gradients,
                shared=order.shared,
                per_node=order.per_node,
                part=part,
                begun=begun,
            )
            self._rings.append(key_ring)

    def attend(self, task: Task) -> list[Operation]:
        index, number = task.index
        part, step = divmod(number, self._order.size)
        return self._rings[part].attend(index, step)

    def rotate(self, task: Task) -> list[Operation]:
        part, step = divmod(task.index[0], self._order.size)
        keys = self._rings[part]
        match task.kind:
            case "KV":
                return keys.hop(step)
            case "sent":
                return keys.send_on(step)
            case _:
                return keys.end()

    def empty(self, task: Task) -> list[Operation]:
        (index,) = task.index
        return self._rings[self._order.last_part(index)].empty(index)

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {name: buffer for ring_ in self._rings for name, buffer in ring_.buffers.items()}
