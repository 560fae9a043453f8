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

from mesh_attention.kernels import Kernel, MaskKind, RowKernels, kind_of, merge_lse
from mesh_attention.plan.program import Attend, AttendBackward, Merge, MergeRule
from mesh_attention.runtime.accumulate import MergedRows, SummedRows, clear
from mesh_attention.runtime.backward import BackwardCall, BackwardWork
from mesh_attention.runtime.coverage import coverage
from mesh_attention.runtime.masks import BlockMasks
from mesh_attention.runtime.transport.interface import View

__all__ = ["Compute", "Work"]

Work = Callable[[], None]


class Compute:
    def __init__(
        self,
        kernels: Mapping[MaskKind, Kernel],
        masks: BlockMasks,
        rows: RowKernels,
        softmax_scale: float,
    ) -> None:
        self._kernels = kernels
        self._masks = masks
        self._rows = rows
        self._softmax_scale = softmax_scale

    def work(self, op: Attend | AttendBackward | Merge, view: View) -> Work:
        match op:
            case Attend():
                return self.attend(op, view)
            case AttendBackward():
                return self.attend_backward(op, view)
            case Merge():
                return self.merge(op, view)

    def attend(self, op: Attend, view: View) -> Work:
        q, k, v, out = (_batch_first(view(p)) for p in (op.q, op.k, op.v, op.out))
        lse = _statistic(view(op.lse))
        queries = [(call.q_start, call.q_stop) for call in op.calls]
        covered = coverage(queries, q.shape[1], fresh=op.fresh)
        works: list[Work] = [
            partial(clear, out[:, a:b], lse[:, :, a:b]) for a, b in covered.untouched
        ]
        for call, stretches in zip(op.calls, covered.stretches, strict=True):
            rows, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
            mask = self._masks.of(op, call)
            forward = partial(
                self._kernels[kind_of(mask)].forward,
                *(q[:, rows], k[:, keys], v[:, keys]),
                mask=mask,
                softmax_scale=self._softmax_scale,
            )
            works.append(partial(_forward, forward, MergedRows(self._rows, out, lse, stretches)))
        return partial(_in_turn, works)

    def attend_backward(self, op: AttendBackward, view: View) -> Work:
        q, k, v, grad_out = (_batch_first(view(p)) for p in (op.q, op.k, op.v, op.grad_out))
        lse = _statistic(view(op.lse))
        out = None if op.out is None else _batch_first(view(op.out))
        delta = None if op.delta is None else _statistic(view(op.delta))
        queries = [(call.q_start, call.q_stop) for call in op.calls]
        keys = [(call.k_start, call.k_stop) for call in op.calls]
        by_query = coverage(queries, q.shape[1], fresh=op.fresh_q)
        by_key = coverage(keys, k.shape[1], fresh=op.fresh_kv)
        sums = [
            (_batch_first(view(piece)), covered)
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
                queries[at],
                keys[at],
                [SummedRows(self._rows, total, c.stretches[at]) for total, c in sums],
            )
            for at, call in enumerate(op.calls)
        ]
        scale = self._softmax_scale
        works.append(BackwardWork(self._rows, calls, scale, q, k, v, grad_out, lse, out, delta))
        return partial(_in_turn, works)

    def merge(self, op: Merge, view: View) -> Work:
        inputs, outputs = ([view(piece) for piece in side] for side in (op.inputs, op.outputs))
        rows = self._rows
        match op.rule:
            case MergeRule.SOFTMAX if not inputs:
                return partial(clear, outputs[0], outputs[1])
            case MergeRule.SOFTMAX:
                outs, lses = map(_batch_first, inputs[::2]), map(_statistic, inputs[1::2])
                target, lse = _batch_first(outputs[0]), _statistic(outputs[1])
                return partial(rows.merge_all, tuple(outs), tuple(lses), target, lse)
            case MergeRule.LSE:
                return partial(_merge_lse, [_statistic(x) for x in inputs], _statistic(outputs[0]))
            case MergeRule.RESCALE:
                out, own, everywhere = _batch_first(inputs[0]), *map(_statistic, inputs[1:])
                return partial(rows.rescale, out, own, everywhere, _batch_first(outputs[0]))
            case MergeRule.SUM if not inputs:
                return partial(clear, outputs[0])
            case MergeRule.SUM:
                return partial(rows.sum, tuple(map(_batch_first, inputs)), _batch_first(outputs[0]))
            case MergeRule.DELTA:
                out, grad_out = map(_batch_first, inputs)
                return partial(rows.delta, out, grad_out, _statistic(outputs[0]))


def _batch_first(x_SBHD: Tensor) -> Tensor:
    return x_SBHD.transpose(0, 1)


def _statistic(x_SBH1: Tensor) -> Tensor:
    return x_SBH1.squeeze(-1).permute(1, 2, 0)


def _forward(forward: Callable[[], tuple[Tensor, Tensor]], target: MergedRows) -> None:
    target.take(*forward())


def _merge_lse(partials: Sequence[Tensor], target: Tensor) -> None:
    target.copy_(merge_lse(partials))


def _in_turn(works: Sequence[Work]) -> None:
    for work in works:
        work()
