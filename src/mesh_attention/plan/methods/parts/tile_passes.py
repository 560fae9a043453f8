"""The two passes of a tile: what is gathered, what is computed, what is reduced.

Forward: gather Q and KV, attend, reduce partial outputs. Backward: gather Q, dO and statistics, and
KV; reduce gradients. With `delta` in place of O the Q group gathers one number a row and head
instead of a whole output (algorithm.md, section 4; BurstEngine drops O from the ring's backward
likewise).
"""

from __future__ import annotations

from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.reduce import Reduction, reduce_output, reduce_sum
from mesh_attention.plan.methods.parts.tile_pass import (
    Calls,
    Fresh,
    Pair,
    Pieces,
    Queries,
    TilePass,
)


class TileForward(TilePass):
    direction = Direction.FORWARD
    merge_rule = MergeRule.SOFTMAX
    q_partials = (Kind.OUT, Kind.LSE)
    q_reduce_kind = "RS-Q"
    kv_reduce_kind = None

    def gathered_with_q(self, gather_out: bool) -> tuple[Kind, ...]:
        return (Kind.Q,)

    def attention(
        self, task: Task, queries: Queries, keys: Pair, sums: Pieces, calls: Calls, fresh: Fresh
    ) -> Operation:
        out, lse = sums
        return Attend(task, queries[Kind.Q], *keys, out, lse, calls, fresh[0])

    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]:
        partial = (f"out.{i}", f"lse.{i}")
        wire = self.q.wire(partial[0])
        out, lse = map(self.head_group.local, (Kind.OUT, Kind.LSE))
        return reduce_output(
            Task(self.q_reduce_kind, (i,)), reduction, partial=partial, wire=wire, out=out, lse=lse
        )


class TileBackward(TilePass):
    direction = Direction.BACKWARD
    merge_rule = MergeRule.SUM
    q_partials = (Kind.GRAD_Q,)
    kv_partials = (Kind.GRAD_K, Kind.GRAD_V)
    q_reduce_kind = "RS-dQ"
    kv_reduce_kind = "RS-dKV"

    def gathered_with_q(self, gather_out: bool) -> tuple[Kind, ...]:
        return (Kind.Q, Kind.GRAD_OUT, Kind.LSE, Kind.OUT if gather_out else Kind.DELTA)

    def attention(
        self, task: Task, queries: Queries, keys: Pair, sums: Pieces, calls: Calls, fresh: Fresh
    ) -> Operation:
        grad_q, grad_k, grad_v = sums
        q, grad_out, lse = (queries[kind] for kind in (Kind.Q, Kind.GRAD_OUT, Kind.LSE))
        out, delta = queries.get(Kind.OUT), queries.get(Kind.DELTA)
        inputs = (q, *keys, grad_out, lse, out, delta)
        return AttendBackward(task, *inputs, grad_q, grad_k, grad_v, calls, *fresh)

    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]:
        task = Task(self.q_reduce_kind, (i,))
        return reduce_sum(task, reduction, self._tensors(self.q_partials, i))

    def reduce_kv(self, j: int, reduction: Reduction) -> list[Operation]:
        task = Task(self.kv_reduce_kind, (j,))
        return reduce_sum(task, reduction, self._tensors(self.kv_partials, j))

    def _tensors(self, kinds: tuple[Kind, ...], index: int) -> tuple[tuple[str, str, str], ...]:
        """Accumulator, what travels, and result of each."""
        local, wire = self.head_group.local, self.q.wire
        return tuple((f"{x}.{index}", wire(f"{x}.{index}"), local(x)) for x in kinds)
