"""What the members of all key rings of a pass hold alike at a step: pieces and operations.

Members differ in whose block they hold and in their partners, not in what they call it. So all but
the transfers is made once for a step and shared: a ring of n has n^2 steps, but few operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import Attend, AttendBackward, Call, Merge, MergeRule, Operation

__all__ = ["Gradients", "KeySteps", "Pair", "QueryPieces"]

Pair = tuple[Piece, Piece]  # of K and of V


class Gradients(StrEnum):
    """How dK and dV of a wandering block come home."""

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
    """`own` are the buffers of the block to begin with, `block_rows` the rows of a block.

    Calls are told apart by identity: `Lowerings` makes equal calls the same object.
    """

    def __init__(self, own: tuple[str, str], block_rows: int, queries: QueryPieces) -> None:
        self._own = own
        self._block_rows = block_rows
        self._queries = queries
        self._attends: dict[tuple[int, int, bool], Operation] = {}
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
        key = (step, id(calls), fresh)
        if key not in self._attends:
            q = self._queries
            self._attends[key] = Attend(
                f"C-0-{step}", q.q, *self.keys(step), q.out, q.lse, calls, fresh
            )
        return self._attends[key]

    def attend_backward(self, step: int, calls: tuple[Call, ...], *, fresh_q: bool) -> Operation:
        key = (step, id(calls), fresh_q)
        if key not in self._attends:
            q = self._queries
            assert q.grad_out is not None
            assert q.grad_q is not None
            self._attends[key] = AttendBackward(
                f"C-0-{step}",
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
        """What goes home of a step's block: this member's part, and the sum that came with it."""
        merges = []
        sofar = self.arriving(f"{step}.sofar") if travels and step > 1 else ()
        for side, wire in enumerate(self.wires(step)):
            parts = (self.sums(step)[side],) if computed else ()
            came = (sofar[side],) if sofar else ()
            merges.append(Merge(f"dKV-{step}.sum", MergeRule.SUM, parts + came, (wire,)))
        return tuple(merges)

    def _add_arrivals(self, step: int) -> tuple[Operation, ...]:
        """A part that came straight from its maker, into the owner's sum."""
        pairs = zip(self.sums(0), self.arriving(f"home{step}"), strict=True)
        return tuple(
            Merge(f"dKV-{step}.arrived", MergeRule.SUM, (total, part), (total,))
            for total, part in pairs
        )

    def end(self, results: tuple[str, str], *, came_home: bool) -> list[Operation]:
        """The owner's own part and, where it travelled, the sum of all others."""
        home = self.arriving("home")
        return [
            Merge(
                "dKV.end",
                MergeRule.SUM,
                (self.sums(0)[side], home[side]) if came_home else (self.sums(0)[side],),
                (end,),
            )
            for side, end in enumerate(self._pair(*results))
        ]
