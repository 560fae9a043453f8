"""The compute operations on real tensors: attention by kernel calls, and merges.

Buffers hold rows first, (rows, batch, heads, width), so that any rows are contiguous memory and can
be sent as they are. Kernels take (batch, rows, heads, width) by stride, and statistics as
(batch, heads, rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.kernels import (
    BlockMask,
    Causal,
    Full,
    Kernel,
    MaskKind,
    RowRange,
    delta,
    kind_of,
    merge_into,
    merge_lse,
    rescale,
)
from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Call,
    CallKind,
    Merge,
    MergeRule,
    Program,
)
from mesh_attention.runtime.transport.interface import View

__all__ = ["BlockMasks", "Compute"]


class BlockMasks:
    """The mask of every kernel call of a program, worked out once."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan = plan
        self._table = program.buffer_table()
        self._masks: dict[tuple[int, Call], BlockMask] = {}
        self.kinds: set[MaskKind] = set()
        for op in program.operations:
            if isinstance(op, Attend | AttendBackward):
                for call in op.calls:
                    mask = self._make(op.q, op.k, call)
                    self._masks[id(op), call] = mask
                    self.kinds.add(kind_of(mask))

    def of(self, op: Attend | AttendBackward, call: Call) -> BlockMask:
        return self._masks[id(op), call]

    def _make(self, q: Piece, k: Piece, call: Call) -> BlockMask:
        if call.kind is CallKind.FULL:
            return Full()
        if call.kind is CallKind.CAUSAL:
            return Causal()
        plan = self._plan
        queries = plan.q_layout.positions_of(q.spans(self._table[q.buffer]))
        keys = plan.kv_layout.positions_of(k.spans(self._table[k.buffer]))
        lo, hi = plan.problem.rows.bounds(queries[call.q_start : call.q_stop])
        # They stay on the CPU: kernels then skip hidden blocks without asking the device.
        return RowRange(
            torch.from_numpy(lo.copy()),
            torch.from_numpy(hi.copy()),
            torch.from_numpy(keys[call.k_start : call.k_stop].copy()),
        )


@dataclass(frozen=True, slots=True)
class Compute:
    kernels: Mapping[MaskKind, Kernel]
    masks: BlockMasks
    softmax_scale: float

    def attend(self, op: Attend, view: View) -> None:
        q, k, v, out = (_batch_first(view(p)) for p in (op.q, op.k, op.v, op.out))
        lse = _statistic(view(op.lse))
        if op.fresh:
            out.zero_()
            lse.fill_(-torch.inf)
        for call in op.calls:
            rows, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
            mask = self.masks.of(op, call)
            part_out, part_lse = self.kernels[kind_of(mask)].forward(
                q[:, rows], k[:, keys], v[:, keys], mask=mask, softmax_scale=self.softmax_scale
            )
            merge_into(out[:, rows], lse[:, :, rows], part_out, part_lse)

    def attend_backward(self, op: AttendBackward, view: View) -> None:
        q, k, v, grad_out = (_batch_first(view(p)) for p in (op.q, op.k, op.v, op.grad_out))
        grad_q, grad_k, grad_v = (_batch_first(view(p)) for p in (op.grad_q, op.grad_k, op.grad_v))
        lse = _statistic(view(op.lse))
        out = None if op.out is None else _batch_first(view(op.out))
        row_sums = None if op.delta is None else _statistic(view(op.delta))
        if op.fresh_q:
            grad_q.zero_()
        if op.fresh_kv:
            grad_k.zero_()
            grad_v.zero_()
        for call in op.calls:
            rows, keys = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
            mask = self.masks.of(op, call)
            dq, dk, dv = self.kernels[kind_of(mask)].backward(
                grad_out[:, rows],
                q[:, rows],
                k[:, keys],
                v[:, keys],
                None if out is None else out[:, rows],
                lse[:, :, rows],
                None if row_sums is None else row_sums[:, :, rows],
                mask=mask,
                softmax_scale=self.softmax_scale,
            )
            grad_q[:, rows] += dq
            grad_k[:, keys] += dk
            grad_v[:, keys] += dv

    def merge(self, op: Merge, view: View) -> None:
        inputs = [view(piece) for piece in op.inputs]
        outputs = [view(piece) for piece in op.outputs]
        match op.rule:
            case MergeRule.SOFTMAX:
                _softmax(inputs[::2], inputs[1::2], *outputs)
            case MergeRule.LSE:
                merged = merge_lse([_statistic(lse) for lse in inputs])
                _statistic(outputs[0]).copy_(merged)
            case MergeRule.RESCALE:
                out, own, everywhere = inputs
                scaled = rescale(_batch_first(out), _statistic(own), _statistic(everywhere))
                _batch_first(outputs[0]).copy_(scaled)
            case MergeRule.SUM:
                _sum(inputs, outputs[0])
            case MergeRule.DELTA:
                out, grad_out = (_batch_first(x) for x in inputs)
                _statistic(outputs[0]).copy_(delta(out, grad_out))


def _batch_first(x_SBHD: Tensor) -> Tensor:
    return x_SBHD.transpose(0, 1)


def _statistic(x_SBH1: Tensor) -> Tensor:
    return x_SBH1.squeeze(-1).permute(1, 2, 0)


def _softmax(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
    if not outs:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if len(outs) == 1:
        out.copy_(outs[0])
        lse.copy_(lses[0])
        return
    # Merged one by one in the accumulator's precision, and rounded once.
    total = torch.zeros(out.shape, dtype=lse.dtype, device=out.device)
    lse.fill_(-torch.inf)
    for part, part_lse in zip(outs, lses, strict=True):
        merge_into(_batch_first(total), _statistic(lse), _batch_first(part), _statistic(part_lse))
    out.copy_(total)


def _sum(inputs: Sequence[Tensor], output: Tensor) -> None:
    if not inputs:
        output.zero_()
        return
    if len(inputs) == 1:
        output.copy_(inputs[0])
        return
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    total = inputs[0].to(wide, copy=True)
    for part in inputs[1:]:
        total += part
    output.copy_(total)
