"""Keys that rotate: the steps of one member of Ring-Attention (algorithm.md, section 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV to the owners
of their block, direct or with the block (`rotate.py`). `ring_order.py` and StarTrail use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, SendRecv, Task
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.rotate import (
    Delivery,
    GradientRoute,
    Rotation,
    deliveries,
    hop,
)
from mesh_attention.plan.methods.parts.tile_pass import Pair, Pieces, TilePass, attention
from mesh_attention.plan.problem.spans import Spans

_KEYS, _GRADS = (Kind.K, Kind.V), (Kind.GRAD_K, Kind.GRAD_V)
_EMPTY = Task("C", stage="empty")


@lru_cache(maxsize=1 << 14)
def _pair(k: str, v: str, rows: int) -> Pair:
    """Members have the same buffer names at a step, so they share these pieces."""
    return Piece(k, 0, rows), Piece(v, 0, rows)


@dataclass(frozen=True)
class KeyRoute:
    """The way of gradients to their owners; `per_node` members follow each other in a node. Members
    share all operations but transfers (`shared`): those of n members with n steps each would take
    long to plan and to read."""

    gradients: GradientRoute
    per_node: int | None
    shared: dict[object, list[Operation]] = field(default_factory=dict)


class KeyRing:
    """The steps of one member, which has the queries of a tile row.

    `rows` are the rows of the block of each step, `own` the pieces of the member's own block, which
    is that of step 0, and `results` the pieces for its gradients.

    Where heads or keys are cut, each KV chunk (`part`) goes round in a ring of its own. Steps and
    names of buffers are numbered through all rings. `begun`, which all rings of a member share: the
    Q chunks with results in their accumulators.
    """

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        route: KeyRoute,
        row: int,
        group: str,
        rotation: Rotation,
        rows: list[Spans],
        own: Pair,
        results: Pair,
        *,
        part: int = 0,
        begun: set[int] | None = None,
    ) -> None:
        self._mesh, self._group, self._rotation, self._rows = mesh, group, rotation, rows
        self._own, self._results, self._shared = own, results, route.shared
        self._heads = mesh.kv.own.heads_of(mesh.kv.chunks[part])
        self.size = rotation.size
        self._first = part * self.size  # the number of the first step
        self._travels = route.gradients is GradientRoute.TRAVEL
        self._deliveries = deliveries(rotation, route.gradients, route.per_node)
        self._arrived: dict[int, list[Pair]] = {}  # by step: sums that came with its block
        self._begun = set[int]()  # steps with gradients in their accumulators
        self._begun_q = set[int]() if begun is None else begun
        self._block_rows = sum(stop - start for start, stop in rows[0])
        first = part // mesh.kv.chunks_of_slice * mesh.q.chunks_of_slice
        self.queries = range(first, first + mesh.q.chunks_of_slice)  # the Q chunks that it meets
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
        task = Task("KV", (self._first + step,))
        return [hop(task, self._group, self._rotation, step, self._keys)]

    def attend(self, index: int, step: int) -> list[Operation]:
        """The attention of a Q chunk and the block of a step."""
        mesh, calls, begun = self._mesh, self._calls[index][step], index in self._begun_q
        number = self._first + step
        sums: Pieces = ()
        if self._backward:
            sums = self._sums(step)
            self._declare(sums, _GRADS, step, Precision.ACCUMULATE)
        if not calls:
            return []
        first = step not in self._begun
        key: object = (index, number, self._own, calls, begun, first)
        if key not in self._shared:
            task, totals = Task("C", (index, number)), mesh.q.sums(index) + sums
            operands = (mesh.q.pieces(index), self._keys(step), totals)
            self._shared[key] = [attention(task, *operands, calls, (not begun, first))]
        self._begun_q.add(index)
        self._begun.add(step)
        return self._shared[key]

    def send_on(self, step: int) -> list[Operation]:
        """The transfers of gradients that are due once all queries have met the keys of a step."""
        if not self._backward:
            return []
        operations: list[Operation] = []
        if step == 0 and 0 not in self._begun:
            self._begun.add(0)
            operations += [Merge(_EMPTY, MergeRule.SUM, (), (sums,)) for sums in self._sums(0)]
        for delivery in self._deliveries[step]:
            operations += self._deliver(delivery)
        return operations

    def empty(self, index: int) -> list[Operation]:
        """Neutral results of a Q chunk that no attention has computed."""
        if index in self._begun_q:
            return []
        self._begun_q.add(index)
        return [Merge(_EMPTY, self._mesh.q.merge_rule, (), self._mesh.q.sums(index))]

    def end(self) -> list[Operation]:
        """The total gradients of the member's own block, with the sums that came with it."""
        if not self._backward:
            return []
        parts = [self._sums(0), *self._arrived.get(0, ())]
        task = Task("dKV", stage="end")
        return [
            Merge(task, MergeRule.SUM, tuple(pair[side] for pair in parts), (result,))
            for side, result in enumerate(self._results)
        ]

    def _grads(self, suffix: str) -> Pair:
        """Gradients: `3` of step 3, `3.wire` as they are sent, `back3` as they arrive, ..."""
        return _pair(f"grad_k.{suffix}", f"grad_v.{suffix}", self._block_rows)

    def _sums(self, step: int) -> Pair:
        return self._grads(f"{self._first + step}")

    def _keys(self, step: int) -> Pair:
        number = self._first + step
        return _pair(f"k.{number}", f"v.{number}", self._block_rows) if step else self._own

    def _declare(
        self,
        pieces: Pieces,
        kinds: tuple[Kind, ...],
        step: int,
        precision: Precision = Precision.ELEMENT,
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._heads
        for piece, kind in zip(pieces, kinds, strict=True):
            self.buffers[piece.buffer] = Buffer(piece.buffer, kind, rows, heads, precision)

    def _deliver(self, delivery: Delivery) -> list[Operation]:
        """Sends this member's gradients of a step's block, with the sum that came with the block.
        Arriving gradients go on with their block, or are added to its gradients here."""
        step, to, source, block = delivery
        number = self._first + step
        parts = [self._sums(step)] * (step in self._begun) + self._arrived.pop(step, [])
        goes_on = self._travels and block
        outgoing = self._grads(f"{number}.wire")
        incoming = self._grads(f"{self._first + block}.sofar" if goes_on else f"back{number}")
        self._declare(outgoing, _GRADS, step)
        self._declare(incoming, _GRADS, block)
        task, key = Task("dKV", (number,)), ("sum", number, len(parts))
        if key not in self._shared:
            self._shared[key] = [
                Merge(task.at("sum"), MergeRule.SUM, tuple(pair[side] for pair in parts), (wire,))
                for side, wire in enumerate(outgoing)
            ]
        transfer = SendRecv(task, self._group, to, outgoing, source, incoming)
        operations = [*self._shared[key], transfer]
        if self._travels:
            self._arrived[block] = [incoming]
            return operations
        totals, begun = self._sums(block), block in self._begun
        self._declare(totals, _GRADS, block, Precision.ACCUMULATE)
        self._begun.add(block)
        for total, part in zip(totals, incoming, strict=True):
            summands = (total, part) if begun else (part,)
            operations.append(Merge(task.at("arrived"), MergeRule.SUM, summands, (total,)))
        return operations
