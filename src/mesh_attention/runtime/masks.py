"""The masks of a program's kernel calls, worked out once."""

from __future__ import annotations

import torch

from mesh_attention.kernels import BlockMask, Causal, Full, MaskKind, RowRange, kind_of
from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Attend, AttendBackward, Call, CallKind, Program

__all__ = ["BlockMasks"]


class BlockMasks:
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
