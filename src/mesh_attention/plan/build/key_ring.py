"""Keys that rotate: the steps of Ring-Attention and of what is made of it (algorithm.md, 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV after them,
direct or travelling (`rotate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.build.rotate import Reach, Rotation, deliveries, hop, ring
from mesh_attention.plan.build.tile_pass import Pair, Pieces, TilePass
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import Merge, MergeRule, Operation, SendRecv, Task
from mesh_attention.plan.schedule.tasks import Step

_KEYS, _GRADS = (Kind.K, Kind.V), (Kind.GRAD_K, Kind.GRAD_V)
_EMPTY = Task("C", stage="empty")


@lru_cache(maxsize=1 << 14)
def _pair(k: str, v: str, rows: int) -> Pair:
    """Members call what they hold at a step by the same names, so they share these pieces."""
    return Piece(k, 0, rows), Piece(v, 0, rows)


class KeyRing:
    """The steps of one member, whose queries are those of a tile row.

    `blocks(member)` gives the rows of a member's block, `own` the buffers of the first one, and
    `results` where the gradients of the own block go; `per_node` members are in a node, one after
    the other. Members share all operations but transfers (`shared`), or a ring of n, which has n^2
    steps, would take long to plan and to read.
    """

    def __init__(
        self,
        mesh: TilePass,
        lowerings: Lowerings,
        row: int,
        group: str,
        rotation: Rotation,
        blocks: Callable[[int], Spans],
        own: tuple[str, str],
        results: tuple[str, str],
        gradients: Reach,
        shared: dict[object, list[Operation]],
        per_node: int | None = None,
    ) -> None:
        self._mesh = mesh
        self._group = group
        self._heads = mesh.head_group.heads(Kind.K)
        self._shared = shared
        self._rotation = rotation
        self._own, self._results = own, results
        self._travels = gradients is Reach.TRAVEL
        self._deliveries = deliveries(rotation, per_node)
        self._begun = {0}  # steps whose gradients hold parts of others, or the own
        self._rows = [blocks(member) for member in rotation.blocks]
        self._block_rows = sum(stop - start for start, stop in self._rows[0])
        seen = lowerings.queries(mesh.q.spans(row, 0))
        self._calls = [lowerings.calls(seen, lowerings.keys(rows)) for rows in self._rows]
        self.buffers: dict[str, Buffer] = {}
        self.operations = self._make()

    def _make(self) -> list[Operation]:
        mesh, size = self._mesh, self._rotation.size
        backward = mesh.direction is Direction.BACKWARD
        queries, q_sums = mesh.queries(0), mesh.q.sums(0)
        operations: list[Operation] = []
        begun = False
        for step, calls in enumerate(self._calls):
            if step + 1 < size:
                self._declare(self._keys(step + 1), _KEYS, step + 1)
                task = Task("KV", (step + 1,))
                operations.append(hop(task, self._group, self._rotation, step + 1, self._keys))
            sums: Pieces = self._pair(f"{step}") if backward else ()
            if calls:
                first = step == 0 or step not in self._begun
                key: object = (step, self._own, calls, begun, first)
                if key not in self._shared:
                    task, fresh = Task("C", (0, step)), (not begun, first)
                    operands = (queries, self._keys(step), q_sums + sums, calls, fresh)
                    self._shared[key] = [mesh.attention(task, *operands)]
                operations += self._shared[key]
                begun = True
                self._begun.add(step)
            if backward:
                self._declare(sums, _GRADS, step, Precision.ACCUMULATE)
                send = self._pass_on if self._travels else self._deliver
                operations += send(step) if step else self._empty_own()
        if not begun:
            operations.append(Merge(_EMPTY, mesh.merge_rule, (), q_sums))
        return operations + (self._end() if backward else [])

    def _pair(self, suffix: str) -> Pair:
        """Gradients: `3` of step 3, `3.wire` as they travel, `back` as they arrive, ..."""
        return _pair(f"grad_k.{suffix}", f"grad_v.{suffix}", self._block_rows)

    def _keys(self, step: int) -> Pair:
        k, v = (f"k.{step}", f"v.{step}") if step else self._own
        return _pair(k, v, self._block_rows)

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
        if self._calls[0]:
            return []
        return [Merge(_EMPTY, MergeRule.SUM, (), (total,)) for total in self._pair("0")]

    def _pass_on(self, step: int) -> list[Operation]:
        """This member's part of the gradients of a step's block, with the sum that came along."""
        way, last = self._rotation.hops[0], step == self._rotation.size - 1
        suffix, arrives = (f"back{step}", 0) if last else (f"{step + 1}.sofar", step + 1)
        parts = [self._pair(f"{step}")] * bool(self._calls[step])
        parts += [self._pair(f"{step}.sofar")] * (step > 1)
        return self._send(step, parts, way.to_member, way.from_member, suffix, arrives)

    def _deliver(self, step: int) -> list[Operation]:
        operations: list[Operation] = []
        for of, to_member, from_member, block in self._deliveries[step]:
            parts = [self._pair(f"{of}")] * (of in self._begun)
            operations += self._send(of, parts, to_member, from_member, f"back{of}", block)
            operations += self._arrived(of, block)
        return operations

    def _send(
        self, step: int, parts: list[Pair], to: int, source: int, suffix: str, arrives: int
    ) -> list[Operation]:
        """The sum of the parts of a step's block; what comes is of the block of step `arrives`."""
        task = Task("dKV", (step,))
        outgoing, incoming = self._pair(f"{step}.wire"), self._pair(suffix)
        self._declare(outgoing, _GRADS, step)
        self._declare(incoming, _GRADS, arrives)
        key = ("sum", step, len(parts))
        if key not in self._shared:
            self._shared[key] = [
                Merge(task.at("sum"), MergeRule.SUM, tuple(pair[side] for pair in parts), (wire,))
                for side, wire in enumerate(outgoing)
            ]
        transfer = SendRecv(task, self._group, to, outgoing, source, incoming)
        return [*self._shared[key], transfer]

    def _arrived(self, step: int, block: int) -> list[Operation]:
        """What came is added to the gradients of the block of that step."""
        totals, incoming = self._pair(f"{block}"), self._pair(f"back{step}")
        self._declare(totals, _GRADS, block, Precision.ACCUMULATE)
        task, begun = Task("dKV", (step,), "arrived"), block in self._begun
        self._begun.add(block)
        return [
            Merge(task, MergeRule.SUM, (total, part) if begun else (part,), (total,))
            for total, part in zip(totals, incoming, strict=True)
        ]

    def _end(self) -> list[Operation]:
        """The owner's total, and what travelled."""
        size = self._rotation.size
        came = [self._pair(f"back{size - 1}")] * (self._travels and size > 1)
        return [
            Merge(
                Task("dKV", stage="end"),
                MergeRule.SUM,
                tuple(pair[side] for pair in (self._pair("0"), *came)),
                (Piece(result, 0, self._block_rows),),
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
