"""The attentions of a program on real tensors, by kernel calls.

`Attentions.bind` does what can be done before the tensors of an operation hold anything, and
returns the rest as a function without arguments.

Buffers hold rows first, (rows, batch, heads, width), so that any rows are contiguous memory and can
be sent as they are. Kernels take (batch, rows, heads, width) by stride, and statistics as
(batch, heads, rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from math import inf
from typing import NamedTuple

from mesh_attention.kernels import BackwardInputs, Block, CheckedCall, Kernel
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, Operation
from mesh_attention.runtime.execute.binding import Views, cut
from mesh_attention.runtime.execute.call_masks import Masks
from mesh_attention.runtime.execute.frame import Frame
from mesh_attention.runtime.execute.kernel_calls import (
    KernelCalls,
    MergedRows,
    Preparation,
    SummedRows,
    needs_of_calls,
)
from mesh_attention.runtime.execute.steps import coverage, must_follow

Work = Callable[[], object]


class Scores(NamedTuple):
    """What becomes of the products of queries and keys, as `Block` has it."""

    softmax_scale: float
    softcap: float = 0.0


class Attentions:
    def __init__(
        self,
        frame: Frame,
        masks: Masks,
        kernels: Mapping[str, Kernel],
        scores: Scores,
        *,
        deterministic: bool,
    ) -> None:
        program = frame.program
        self.operations: Sequence[Operation] = program.operations
        self._rows, self._kernels = frame.rows, kernels
        self._scores, self._deterministic = scores, deterministic
        # The streams on which kernel calls take turns, if they do.
        self._turns = frame.streams if frame.two_streams else None
        self._follow = must_follow(program.operations, frame.memory) if self._turns else set()
        self.masks = masks
        covered = cache(coverage)  # slices of heads have the same calls
        self._coverage = {
            at: [
                covered(rows, length, fresh=fresh)
                for rows, length, fresh in _rows_of_calls(program.operations[at])
            ]
            for at in masks
        }

    def with_masks(self, masks: Masks, operations: Sequence[Operation]) -> Attentions:
        """The same calls under other masks of the same kinds; they may leave more SMs or fewer."""
        other = copy(self)
        other.masks, other.operations = masks, operations
        return other

    def bind(self, at: int, views: Views) -> Work:
        op = self.operations[at]
        assert isinstance(op, Attend | AttendBackward), f"{op.name} is no attention"
        q, k, v = (views.tokens(p) for p in (op.q, op.k, op.v))
        preparation: Preparation | None = None
        targets: list[MergedRows | SummedRows]
        if isinstance(op, Attend):
            direction = Direction.FORWARD
            out, lse = views.tokens(op.out), views.statistics(op.lse)
            (covered,) = self._coverage[at]
            targets = [MergedRows(self._rows, out, lse, rows) for rows in covered.stretches]
            untouched = [(out[:, a:b], 0.0) for a, b in covered.untouched]
            untouched += [(lse[:, :, a:b], -inf) for a, b in covered.untouched]
        else:
            direction = Direction.BACKWARD
            by_query, by_key = self._coverage[at]
            grads = [views.tokens(p) for p in (op.grad_q, op.grad_k, op.grad_v)]
            sums = [*zip(grads, (by_query, by_key, by_key), strict=True)]
            targets = [
                SummedRows(self._rows, [(grad, c.stretches[i]) for grad, c in sums])
                for i in range(len(op.calls))
            ]
            untouched = [(grad[:, a:b], 0.0) for grad, c in sums for a, b in c.untouched]
            whole = BackwardInputs(
                views.tokens(op.grad_out),
                None if op.out is None else views.tokens(op.out),
                views.statistics(op.lse),
                None if op.delta is None else views.statistics(op.delta),
            )
            needs = needs_of_calls(op, self._kernels)
            preparation = Preparation(self._rows, needs, whole)
        calls = []
        for call, mask, target in zip(op.calls, self.masks[at], targets, strict=True):
            block = Block(
                cut(q, 1, call.q_start, call.q_stop),
                cut(k, 1, call.k_start, call.k_stop),
                cut(v, 1, call.k_start, call.k_stop),
                mask,
                *self._scores,
                call.leave_sms,
                target.into(q.dtype),
                deterministic=self._deterministic,
            )
            calls.append((CheckedCall(self._kernels[call.kernel], direction, block), target))
        follows = at in self._follow
        return KernelCalls(calls, untouched, preparation, self._turns, follows=follows)


def _rows_of_calls(op: Operation) -> Iterator[tuple[tuple[tuple[int, int], ...], int, bool]]:
    """(rows of the calls, of all, and if fresh) of queries; in backward of keys too."""
    assert isinstance(op, Attend | AttendBackward)
    queries = tuple([(call.q_start, call.q_stop) for call in op.calls])
    if isinstance(op, Attend):
        yield queries, op.q.num_rows, op.fresh
        return
    yield queries, op.q.num_rows, op.fresh_q
    keys = tuple([(call.k_start, call.k_stop) for call in op.calls])
    yield keys, op.k.num_rows, op.fresh_kv
