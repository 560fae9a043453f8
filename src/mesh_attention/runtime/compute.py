"""The compute operations on real tensors: attention by kernel calls, and merges.

Each method takes an operation and the tensors behind its pieces, and returns the work as a function
without arguments: what can be known before the tensors hold anything is done once, and an operation
on workspace buffers keeps its function from call to call.

Buffers hold rows first, (rows, batch, heads, width), so that any rows are contiguous memory and can
be sent as they are. Kernels take (batch, rows, heads, width) by stride, and statistics as
(batch, heads, rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from mesh_attention.kernels import Kernel, MaskKind, RowKernels, kind_of
from mesh_attention.plan.program import Attend, AttendBackward, Merge, MergeRule
from mesh_attention.runtime.accumulate import MergedRows, SummedRows, clear
from mesh_attention.runtime.backward import BackwardCall, BackwardWork
from mesh_attention.runtime.binding import Views, cut
from mesh_attention.runtime.coverage import Coverage, coverage
from mesh_attention.runtime.masks import BlockMasks
from mesh_attention.runtime.streams import ComputeStreams

__all__ = ["Compute", "Work"]

Work = Callable[[], None]


class Compute:
    def __init__(
        self,
        kernels: Mapping[MaskKind, Kernel],
        masks: BlockMasks,
        rows: RowKernels,
        softmax_scale: float,
        streams: ComputeStreams,
    ) -> None:
        self._kernels = kernels
        self._streams = streams
        self._masks = masks
        self._rows = rows
        self._softmax_scale = softmax_scale
        self._covered: dict[tuple[int, str], Coverage] = {}  # by operation and side

    def work(self, op: Attend | AttendBackward | Merge, views: Views, *, follows: bool) -> Work:
        """`follows`: the first kernel call reads what was computed right before it."""
        match op:
            case Attend():
                return self.attend(op, views, follows=follows)
            case AttendBackward():
                return self.attend_backward(op, views, follows=follows)
            case Merge():
                return self.merge(op, views)

    def attend(self, op: Attend, views: Views, *, follows: bool) -> Work:
        q, k, v, out = (views.tokens(p) for p in (op.q, op.k, op.v, op.out))
        lse = views.statistics(op.lse)
        covered = self._coverage(op, "q", q.shape[1], op.fresh)
        works: list[Work] = [
            partial(clear, out[:, a:b], lse[:, :, a:b]) for a, b in covered.untouched
        ]
        for call, stretches in zip(op.calls, covered.stretches, strict=True):
            mask = self._masks.of(op, call)
            forward = partial(
                self._kernels[kind_of(mask)].forward,
                cut(q, 1, call.q_start, call.q_stop),
                *(cut(x, 1, call.k_start, call.k_stop) for x in (k, v)),
                mask=mask,
                softmax_scale=self._softmax_scale,
            )
            target = MergedRows(self._rows, out, lse, stretches)
            works.append(partial(_forward, self._streams, follows, forward, target))
            follows = False
        return partial(_in_turn, works)

    def attend_backward(self, op: AttendBackward, views: Views, *, follows: bool) -> Work:
        q, k, v, grad_out = (views.tokens(p) for p in (op.q, op.k, op.v, op.grad_out))
        lse = views.statistics(op.lse)
        out = None if op.out is None else views.tokens(op.out)
        delta = None if op.delta is None else views.statistics(op.delta)
        by_query = self._coverage(op, "q", q.shape[1], op.fresh_q)
        by_key = self._coverage(op, "k", k.shape[1], op.fresh_kv)
        sums = [
            (views.tokens(piece), covered)
            for piece, covered in (
                *((op.grad_q, by_query), (op.grad_k, by_key)),
                (op.grad_v, by_key),
            )
        ]
        works: list[Work] = [
            partial(clear, total[:, a:b]) for total, covered in sums for a, b in covered.untouched
        ]
        calls = [
            BackwardCall(
                self._kernels[kind_of(mask := self._masks.of(op, call))],
                mask,
                (call.q_start, call.q_stop),
                (call.k_start, call.k_stop),
                [SummedRows(self._rows, total, c.stretches[at]) for total, c in sums],
            )
            for at, call in enumerate(op.calls)
        ]
        scale = self._softmax_scale
        tensors = (q, k, v, grad_out, lse, out, delta)
        works.append(
            BackwardWork(self._rows, calls, scale, *tensors, streams=self._streams, follows=follows)
        )
        return partial(_in_turn, works)

    def _coverage(
        self, op: Attend | AttendBackward, side: str, length: int, fresh: bool
    ) -> Coverage:
        key = (id(op), side)
        if key not in self._covered:
            intervals = [
                (c.q_start, c.q_stop) if side == "q" else (c.k_start, c.k_stop) for c in op.calls
            ]
            self._covered[key] = coverage(intervals, length, fresh=fresh)
        return self._covered[key]

    def merge(self, op: Merge, views: Views) -> Work:
        rows, tokens, statistics = self._rows, views.tokens, views.statistics
        inputs, outputs = op.inputs, op.outputs
        match op.rule:
            case MergeRule.SOFTMAX:
                out, lse = tokens(outputs[0]), statistics(outputs[1])
                if not inputs:
                    return partial(clear, out, lse)
                outs, lses = map(tokens, inputs[::2]), map(statistics, inputs[1::2])
                return partial(rows.merge_all, tuple(outs), tuple(lses), out, lse)
            case MergeRule.LSE:
                return partial(rows.merge_lse, [*map(statistics, inputs)], statistics(outputs[0]))
            case MergeRule.RESCALE:
                out, own, everywhere = tokens(inputs[0]), *map(statistics, inputs[1:])
                return partial(rows.rescale, out, own, everywhere, tokens(outputs[0]))
            case MergeRule.SUM:
                total = tokens(outputs[0])
                if not inputs:
                    return partial(clear, total)
                return partial(rows.sum, tuple(map(tokens, inputs)), total)
            case MergeRule.DELTA:
                out, grad_out = map(tokens, inputs)
                return partial(rows.delta, out, grad_out, statistics(outputs[0]))


def _forward(
    streams: ComputeStreams,
    follows: bool,
    forward: Callable[[], tuple[Tensor, Tensor]],
    target: MergedRows,
) -> None:
    streams.turn()
    if follows:
        streams.follow()
    result = forward()
    streams.follow()
    target.take(*result)


def _in_turn(works: Sequence[Work]) -> None:
    for work in works:
        work()
