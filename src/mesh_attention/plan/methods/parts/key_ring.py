"""Keys that rotate: the steps of one member of Ring-Attention (algorithm.md, section 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV to the owners
of their block, direct or with the block (`rotate.py`). `ring_order.py` makes a `KeyRing` for each
unit and asks it for the operations of task after task; StarTrail asks for all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    per_node: int
    shared: dict[object, list[Operation]] = field(default_factory=dict)


class KeyRing:
    """The steps of one member, which has the queries of a tile row.

    Each KV chunk goes round in a ring of its own, one ring after the other. Steps are numbered
    through all rings: step s of ring r has number `r * size + s`. By number `rows` are the rows of
    the block of each step. By ring `own` are the pieces of the member's own block, which is that of
    step 0, and `results` the pieces for its gradients.
    """

    def __init__(
        self,
        tiles: TilePass,
        lowerings: Lowerings,
        route: KeyRoute,
        row: int,
        group: str,
        rotation: Rotation,
        rows: Sequence[Spans],
        own: Sequence[Pair],
        results: Sequence[Pair],
    ) -> None:
        self._tiles, self._group, self._rotation = tiles, group, rotation
        self._own, self._results, self._shared = own, results, route.shared
        self._size = rotation.size
        self._travels = route.gradients is GradientRoute.TRAVEL
        self._deliveries = deliveries(rotation, route.gradients, route.per_node)
        self._arrived: dict[int, list[Pair]] = {}  # by number: sums that came with its block
        self._begun = set[int]()  # numbers of steps with gradients in their accumulators
        self._begun_q = set[int]()  # Q chunks with results in theirs
        self._keys = [lowerings.keys(spans) for spans in rows]
        self._queries = [
            lowerings.queries(tiles.q.spans(row, i)) for i in range(len(tiles.q.chunks))
        ]
        self._lowerings, self._backward = lowerings, tiles.direction is Direction.BACKWARD
        self._heads = [tiles.kv.own.heads_of(chunk) for chunk in tiles.kv.chunks]
        self.buffers: dict[str, Buffer] = {}

    def operations(self, task: Task) -> list[Operation]:
        """Of the transfer of a block or of its gradients, of the end of a ring, or of an attention
        (`ring_order.py`)."""
        number = task.index[-1]
        match task.kind:
            case "KV":
                return self._hop(number)
            case "sent":
                return self._send_on(number)
            case "end":
                return self._end(number // self._size)
            case _:
                return self._attend(task.index[0], number)

    def all_operations(self) -> list[Operation]:
        """Of one ring with one Q chunk, step by step."""
        operations: list[Operation] = []
        for step in range(self._size):
            if step + 1 < self._size:
                operations += self._hop(step + 1)
            operations += self._attend(0, step)
            operations += self._send_on(step)
        return operations + self.empty(Task("C", (0,))) + self._end(0)

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results of a Q chunk that no attention has computed."""
        (index,) = task.index
        return [] if index in self._begun_q else [self._nothing(self._tiles.q.sums(index))]

    def _hop(self, number: int) -> list[Operation]:
        """The transfer that brings the block of a step."""
        step = number % self._size
        self._declare(self._block(number), _KEYS, number)
        task = Task("KV", (number,))
        first = number - step
        return [hop(task, self._group, self._rotation, step, lambda s: self._block(first + s))]

    def _attend(self, index: int, number: int) -> list[Operation]:
        """The attention of a Q chunk and the block of a step."""
        tiles, begun, sums = self._tiles, index in self._begun_q, Pieces()
        if self._backward:
            sums = self._grads(number)
            self._declare(sums, _GRADS, number, Precision.ACCUMULATE)
        calls = self._lowerings.calls(self._queries[index], self._keys[number])
        if not calls:
            return []
        first, keys = number not in self._begun, self._block(number)
        key: object = (index, number, keys, calls, begun, first)
        if key not in self._shared:
            task, totals = Task("C", (index, number)), tiles.q.sums(index) + sums
            operands = (tiles.q.pieces(index), keys, totals)
            self._shared[key] = [attention(task, *operands, calls, (not begun, first))]
        self._begun_q.add(index)
        self._begun.add(number)
        return self._shared[key]

    def _send_on(self, number: int) -> list[Operation]:
        """The transfers of gradients that are due once all queries have met the keys of a step."""
        if not self._backward:
            return []
        operations: list[Operation] = []
        step = number % self._size
        if step == 0 and number not in self._begun:
            self._begun.add(number)
            operations += [self._nothing((sums,)) for sums in self._grads(number)]
        for delivery in self._deliveries[step]:
            operations += self._deliver(number - step, delivery)
        return operations

    def _end(self, part: int) -> list[Operation]:
        """The total gradients of the member's own block, with the sums that came with it."""
        if not self._backward:
            return []
        first = part * self._size
        parts = [self._grads(first), *self._arrived.get(first, ())]
        task = Task("dKV", stage="end")
        return [
            Merge(task, MergeRule.SUM, tuple(pair[side] for pair in parts), (result,))
            for side, result in enumerate(self._results[part])
        ]

    def _nothing(self, outputs: Pieces) -> Operation:
        return Merge(Task("C", stage="empty"), self._tiles.q.merge_rule, (), outputs)

    def _grads(self, number: int, before: str = "", after: str = "") -> Pair:
        """Gradients: `3` of step 3, `3.wire` as they are sent, `back3` as they arrive, ..."""
        name = f"{before}{number}{after}"
        return _pair(f"grad_k.{name}", f"grad_v.{name}", self._keys[number].num_rows)

    def _block(self, number: int) -> Pair:
        part, step = divmod(number, self._size)
        if not step:
            return self._own[part]
        return _pair(f"k.{number}", f"v.{number}", self._keys[number].num_rows)

    def _declare(
        self,
        pieces: Pieces,
        kinds: tuple[Kind, ...],
        number: int,
        precision: Precision = Precision.ELEMENT,
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._keys[number].spans, self._heads[number // self._size]
        for piece, kind in zip(pieces, kinds, strict=True):
            self.buffers[piece.buffer] = Buffer(piece.buffer, kind, rows, heads, precision)

    def _deliver(self, first: int, delivery: Delivery) -> list[Operation]:
        """Sends this member's gradients of a step's block, with the sum that came with the block.
        Arriving gradients go on with their block, or are added to its gradients here. `first`: the
        number of the first step of the ring."""
        number, block = first + delivery.step, first + delivery.arrives
        parts = [self._grads(number)] * (number in self._begun) + self._arrived.pop(number, [])
        goes_on = self._travels and block != first
        outgoing = self._grads(number, after=".wire")
        incoming = self._grads(block, after=".sofar") if goes_on else self._grads(number, "back")
        self._declare(outgoing, _GRADS, number)
        self._declare(incoming, _GRADS, block)
        task, key = Task("dKV", (number,)), ("sum", number, len(parts))
        if key not in self._shared:
            self._shared[key] = [
                Merge(task.at("sum"), MergeRule.SUM, tuple(pair[side] for pair in parts), (wire,))
                for side, wire in enumerate(outgoing)
            ]
        to, source = delivery.to_member, delivery.from_member
        transfer = SendRecv(task, self._group, to, outgoing, source, incoming)
        operations = [*self._shared[key], transfer]
        if self._travels:
            self._arrived[block] = [incoming]
            return operations
        totals, begun = self._grads(block), block in self._begun
        self._declare(totals, _GRADS, block, Precision.ACCUMULATE)
        self._begun.add(block)
        for total, part in zip(totals, incoming, strict=True):
            summands = (total, part) if begun else (part,)
            operations.append(Merge(task.at("arrived"), MergeRule.SUM, summands, (total,)))
        return operations
