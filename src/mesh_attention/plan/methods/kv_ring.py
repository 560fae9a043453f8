"""Methods whose queries stay and whose keys wander: Ring-Attention and what is made of it.

A team of `a` units gathers its Q (a = 1: Ring-Attention); the KV blocks wander along a route. The
backward pass sends dK and dV after them, travelling or direct (`circulate.py`). algorithm.md, 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.methods.circulate import Route, hop
from mesh_attention.plan.methods.lowerings import Lowerings
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Call,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
)

__all__ = ["Gradients", "KeyRing", "QueryPieces"]


class Gradients(StrEnum):
    """How dK and dV of a wandering block come home."""

    TRAVEL = "travel"  # with the block: as few partners as the ring, rounded at every step
    DIRECT = "direct"  # each part straight to the owner, who adds in fp32


@dataclass(frozen=True, slots=True)
class QueryPieces:
    """The query side of a pass, with its accumulators; `rows` are its places."""

    rows: Spans
    q: Piece
    out: Piece  # forward: partial output and its LSE
    lse: Piece
    grad_out: Piece | None = None  # backward: statistics are final, grad_q accumulates
    full_out: Piece | None = None
    delta: Piece | None = None
    grad_q: Piece | None = None


class KeyRing:
    """The steps of one member. `blocks(member)` gives the rows of a member's block."""

    def __init__(
        self,
        group: str,
        route: Route,
        blocks: Callable[[int], Spans],
        own: tuple[str, str],
        heads: tuple[int, int],
        queries: QueryPieces,
        lowerings: Lowerings,
    ) -> None:
        self._group = group
        self._route = route
        self._queries = queries
        self._lowerings = lowerings
        self._heads = heads
        self._own = own
        self._rows = [blocks(member) for member in route.blocks]
        self._size = sum(b - a for a, b in self._rows[0])
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, route.size):
            for kind in (Kind.K, Kind.V):
                self._add(f"{kind}.{step}", kind, step)

    def _add(
        self, name: str, kind: Kind, step: int, precision: Precision = Precision.ELEMENT
    ) -> Piece:
        self.buffers[name] = Buffer(name, kind, self._rows[step], self._heads, precision)
        return Piece(name, 0, self._size)

    def _keys(self, step: int) -> tuple[Piece, Piece]:
        names = self._own if step == 0 else (f"k.{step}", f"v.{step}")
        return Piece(names[0], 0, self._size), Piece(names[1], 0, self._size)

    def _bring(self, step: int) -> list[Operation]:
        """The transfer of a step's block; nothing after the last."""
        if step >= self._route.size:
            return []
        return [hop(f"KV-{step}", self._group, self._route, step, self._keys)]

    def _calls(self, step: int) -> tuple[Call, ...]:
        return self._lowerings.between(self._queries.rows, self._rows[step])

    def forward(self) -> list[Operation]:
        """Attention over all blocks, merged into the partial output."""
        q = self._queries
        operations: list[Operation] = []
        begun = False
        for step in range(self._route.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            if calls:
                keys = self._keys(step)
                operations.append(
                    Attend(f"C-0-{step}", q.q, *keys, q.out, q.lse, calls, fresh=not begun)
                )
                begun = True
        if not begun:
            operations.append(Merge("C.empty", MergeRule.SOFTMAX, (), (q.out, q.lse)))
        return operations

    def backward(self, gradients: Gradients, results: tuple[str, str]) -> list[Operation]:
        """Gradients of all blocks; `results` are buffers of this member's own block."""
        q = self._queries
        assert q.grad_out is not None
        assert q.grad_q is not None
        operations: list[Operation] = []
        begun = False
        for step in range(self._route.size):
            operations += self._bring(step + 1)
            calls = self._calls(step)
            sums = (
                self._add(f"grad_k.{step}", Kind.GRAD_K, step, Precision.ACCUMULATE),
                self._add(f"grad_v.{step}", Kind.GRAD_V, step, Precision.ACCUMULATE),
            )
            if calls:
                operations.append(
                    AttendBackward(
                        f"C-0-{step}",
                        q.q,
                        *self._keys(step),
                        q.grad_out,
                        q.lse,
                        q.full_out,
                        q.delta,
                        q.grad_q,
                        sums[0],
                        sums[1],
                        calls,
                        fresh_q=not begun,
                        fresh_kv=True,
                    )
                )
                begun = True
            if step == 0 and not calls:
                operations += [Merge("C.empty", MergeRule.SUM, (), (total,)) for total in sums]
            elif step > 0:
                operations += self._send_home(gradients, step, sums if calls else None)
        if not begun:
            operations.append(Merge("C.empty", MergeRule.SUM, (), (q.grad_q,)))
        return operations + self._end(gradients, results)

    def _send_home(
        self, gradients: Gradients, step: int, sums: tuple[Piece, ...] | None
    ) -> list[Operation]:
        """This member's part of the gradients of a step's block, on its way to the owner."""
        operations: list[Operation] = []
        outgoing = []
        travels = gradients is Gradients.TRAVEL
        for at, (side, kind) in enumerate((("k", Kind.GRAD_K), ("v", Kind.GRAD_V))):
            parts = [] if sums is None else [sums[at]]
            if travels and step > 1:
                parts.append(Piece(f"grad_{side}.{step}.sofar", 0, self._size))
            wire = self._add(f"grad_{side}.{step}.wire", kind, step)
            operations.append(Merge(f"dKV-{step}.sum", MergeRule.SUM, tuple(parts), (wire,)))
            outgoing.append(wire)
        route, last = self._route, step == self._route.size - 1
        if travels:
            way = route.hops[0]
            arrives = 0 if last else step + 1
            to_member, from_member = way.to_member, way.from_member
            suffix = "home" if last else f"{step + 1}.sofar"
        else:
            arrives, suffix = 0, f"home{step}"
            to_member, from_member = route.blocks[step], route.users[step]
        incoming = tuple(
            self._add(f"grad_{side}.{suffix}", kind, arrives)
            for side, kind in (("k", Kind.GRAD_K), ("v", Kind.GRAD_V))
        )
        operations.append(
            SendRecv(f"dKV-{step}", self._group, to_member, tuple(outgoing), from_member, incoming)
        )
        if not travels:
            operations += self._add_arrival(step, incoming)
        return operations

    def _add_arrival(self, step: int, incoming: tuple[Piece, ...]) -> list[Operation]:
        own = [Piece(f"grad_{side}.0", 0, self._size) for side in ("k", "v")]
        return [
            Merge(f"dKV-{step}.arrived", MergeRule.SUM, (total, part), (total,))
            for total, part in zip(own, incoming, strict=True)
        ]

    def _end(self, gradients: Gradients, results: tuple[str, str]) -> list[Operation]:
        operations: list[Operation] = []
        for side, result in zip(("k", "v"), results, strict=True):
            parts = [Piece(f"grad_{side}.0", 0, self._size)]
            if gradients is Gradients.TRAVEL and self._route.size > 1:
                parts.append(Piece(f"grad_{side}.home", 0, self._size))
            end = Piece(result, 0, self._size)
            operations.append(Merge("dKV.end", MergeRule.SUM, tuple(parts), (end,)))
        return operations

    def steps(self, backward: bool) -> list[tuple[str | None, Sequence[str]]]:
        """The schedule: transfers beside the computation they hide behind."""
        size = self._route.size
        steps: list[tuple[str | None, Sequence[str]]] = []
        for step in range(size):
            steps.append((f"KV-{step + 1}" if step + 1 < size else None, (f"C-0-{step}",)))
            if backward and step > 0:
                steps.append((f"dKV-{step}", ()))
        return steps
