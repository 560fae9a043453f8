"""Keys that rotate: the steps of Ring-Attention and of what is made of it (algorithm.md, 9).

Queries stay; KV blocks go round along a `Rotation`. The backward pass sends dK and dV after them,
travelling or direct (`rotate.py`). Members differ in whose block they hold and in their partners,
not in what they call it: all but the transfers is made once for a step (`KeySteps`) and shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.build.rotate import Rotation, hop
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Call,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
    Task,
)
from mesh_attention.plan.schedule.tasks import Step

Pair = tuple[Piece, Piece]  # of K and of V


class Gradients(StrEnum):
    """How dK and dV of a rotating block reach their owner."""

    TRAVEL = "travel"  # with the block: as few partners as the ring, rounded at every step
    DIRECT = "direct"  # each part straight to the owner, who adds in fp32


@dataclass(frozen=True, slots=True)
class QueryPieces:
    """The query side of a pass, with its accumulators."""

    q: Piece
    out: Piece  # forward: partial output and its LSE
    lse: Piece
    grad_out: Piece | None = None  # backward: statistics are final, grad_q accumulates
    full_out: Piece | None = None
    delta: Piece | None = None
    grad_q: Piece | None = None


class KeySteps:
    """`own` are the buffers of the block to begin with, `block_rows` the rows of a block."""

    def __init__(self, own: tuple[str, str], block_rows: int, queries: QueryPieces) -> None:
        self._own = own
        self._block_rows = block_rows
        self._queries = queries
        self._attends: dict[tuple[int, tuple[Call, ...], bool], Operation] = {}
        self.keys = cache(self._keys)
        self.sums = cache(self._sums)
        self.wires = cache(self._wires)
        self.arriving = cache(self._arriving)
        self.sum_up = cache(self._sum_up)
        self.add_arrivals = cache(self._add_arrivals)

    def _pair(self, k_name: str, v_name: str) -> Pair:
        return Piece(k_name, 0, self._block_rows), Piece(v_name, 0, self._block_rows)

    def _keys(self, step: int) -> Pair:
        return self._pair(*self._own) if step == 0 else self._pair(f"k.{step}", f"v.{step}")

    def _sums(self, step: int) -> Pair:
        """This member's part of the gradients of a step's block."""
        return self._pair(f"grad_k.{step}", f"grad_v.{step}")

    def _wires(self, step: int) -> Pair:
        return self._pair(f"grad_k.{step}.wire", f"grad_v.{step}.wire")

    def _arriving(self, suffix: str) -> Pair:
        return self._pair(f"grad_k.{suffix}", f"grad_v.{suffix}")

    def attend(self, step: int, calls: tuple[Call, ...], *, fresh: bool) -> Operation:
        key = (step, calls, fresh)
        if key not in self._attends:
            q = self._queries
            self._attends[key] = Attend(
                Task("C", (0, step)), q.q, *self.keys(step), q.out, q.lse, calls, fresh
            )
        return self._attends[key]

    def attend_backward(self, step: int, calls: tuple[Call, ...], *, fresh_q: bool) -> Operation:
        key = (step, calls, fresh_q)
        if key not in self._attends:
            q = self._queries
            assert q.grad_out is not None
            assert q.grad_q is not None
            self._attends[key] = AttendBackward(
                Task("C", (0, step)),
                q.q,
                *self.keys(step),
                q.grad_out,
                q.lse,
                q.full_out,
                q.delta,
                q.grad_q,
                *self.sums(step),
                calls,
                fresh_q,
                fresh_kv=True,
            )
        return self._attends[key]

    def _sum_up(self, step: int, computed: bool, travels: bool) -> tuple[Operation, ...]:
        """What goes back of a step's block: this member's part, and the sum that came with it."""
        merges = []
        sofar = self.arriving(f"{step}.sofar") if travels and step > 1 else ()
        for side, wire in enumerate(self.wires(step)):
            parts = (self.sums(step)[side],) if computed else ()
            came = (sofar[side],) if sofar else ()
            merges.append(Merge(Task("dKV", (step,), "sum"), MergeRule.SUM, parts + came, (wire,)))
        return tuple(merges)

    def _add_arrivals(self, step: int) -> tuple[Operation, ...]:
        """A part that came straight from its maker, into the owner's sum."""
        pairs = zip(self.sums(0), self.arriving(f"back{step}"), strict=True)
        return tuple(
            Merge(Task("dKV", (step,), "arrived"), MergeRule.SUM, (total, part), (total,))
            for total, part in pairs
        )

    def end(self, results: tuple[str, str], *, came_back: bool) -> list[Operation]:
        """The owner's own part and, where it travelled, the sum of all others."""
        back = self.arriving("back")
        return [
            Merge(
                Task("dKV", stage="end"),
                MergeRule.SUM,
                (self.sums(0)[side], back[side]) if came_back else (self.sums(0)[side],),
                (end,),
            )
            for side, end in enumerate(self._pair(*results))
        ]


_KEYS = (Kind.K, Kind.V)
_GRADS = (Kind.GRAD_K, Kind.GRAD_V)


class KeyRing:
    """The steps of one member. `blocks(member)` gives the rows of a member's block."""

    def __init__(
        self,
        group: str,
        rotation: Rotation,
        blocks: Callable[[int], Spans],
        heads: tuple[int, int],
        rows: Spans,
        queries: QueryPieces,
        steps: KeySteps,
        lowerings: Lowerings,
    ) -> None:
        self._group = group
        self._rotation = rotation
        self._queries = queries
        self._seen = lowerings.queries(rows)
        self._lowerings = lowerings
        self._heads = heads
        self._steps = steps
        self._rows = [blocks(member) for member in rotation.blocks]
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, rotation.size):
            self._add(steps.keys(step), _KEYS, step)

    def _add(
        self,
        pieces: Pair,
        kinds: tuple[Kind, Kind],
        step: int,
        precision: Precision = Precision.ELEMENT,
    ) -> None:
        """Declare the buffers that hold rows of a step's block."""
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, self._rows[step], self._heads, precision)

    def _bring(self, step: int) -> list[Operation]:
        """The transfer of a step's block; nothing after the last."""
        if step >= self._rotation.size:
            return []
        return [hop(Task("KV", (step,)), self._group, self._rotation, step, self._steps.keys)]

    def _calls(self, step: int) -> tuple[Call, ...]:
        return self._lowerings.calls(self._seen, self._lowerings.keys(self._rows[step]))

    def forward(self) -> list[Operation]:
        """Attention over all blocks, merged into the partial output."""
        operations: list[Operation] = []
        begun = False
        for step in range(self._rotation.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            if calls:
                operations.append(self._steps.attend(step, calls, fresh=not begun))
                begun = True
        if not begun:
            empty = (self._queries.out, self._queries.lse)
            operations.append(Merge(Task("C", stage="empty"), MergeRule.SOFTMAX, (), empty))
        return operations

    def backward(self, gradients: Gradients, results: tuple[str, str]) -> list[Operation]:
        """Gradients of all blocks; `results` are buffers of this member's own block."""
        steps, grad_q = self._steps, self._queries.grad_q
        assert grad_q is not None
        operations: list[Operation] = []
        begun = False
        for step in range(self._rotation.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            self._add(steps.sums(step), _GRADS, step, Precision.ACCUMULATE)
            if calls:
                operations.append(steps.attend_backward(step, calls, fresh_q=not begun))
                begun = True
            if step > 0:
                operations += self._send_back(gradients, step, computed=bool(calls))
            elif not calls:
                operations += [
                    Merge(Task("C", stage="empty"), MergeRule.SUM, (), (total,))
                    for total in steps.sums(0)
                ]
        if not begun:
            operations.append(Merge(Task("C", stage="empty"), MergeRule.SUM, (), (grad_q,)))
        came_back = gradients is Gradients.TRAVEL and self._rotation.size > 1
        return operations + steps.end(results, came_back=came_back)

    def _send_back(self, gradients: Gradients, step: int, *, computed: bool) -> list[Operation]:
        """This member's part of the gradients of a step's block, on its way to the owner."""
        rotation, steps = self._rotation, self._steps
        travels = gradients is Gradients.TRAVEL
        if travels:
            to_member, from_member = rotation.hops[0].to_member, rotation.hops[0].from_member
            last = step == rotation.size - 1
            suffix, arrives = ("back", 0) if last else (f"{step + 1}.sofar", step + 1)
        else:
            to_member, from_member = rotation.blocks[step], rotation.users[step]
            suffix, arrives = f"back{step}", 0
        outgoing, incoming = steps.wires(step), steps.arriving(suffix)
        self._add(outgoing, _GRADS, step)
        self._add(incoming, _GRADS, arrives)
        return [
            *steps.sum_up(step, computed, travels),
            SendRecv(Task("dKV", (step,)), self._group, to_member, outgoing, from_member, incoming),
            *(() if travels else steps.add_arrivals(step)),
        ]


def rotating_schedule(size: int, *, backward: bool) -> list[Step]:
    """Transfers beside the computation they hide behind."""
    steps: list[Step] = []
    for step in range(size):
        following = Task("KV", (step + 1,)) if step + 1 < size else None
        steps.append(Step(following, (Task("C", (0, step)),)))
        if backward and step > 0:
            steps.append(Step(Task("dKV", (step,)), ()))
    return steps
