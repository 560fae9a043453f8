"""The two passes of a tile: what is gathered, what is computed, what is reduced.

Forward: gather Q and KV, attend, reduce partial outputs. Backward: gather Q, dO and statistics, and
KV; reduce gradients. With `delta` in place of O the Q group gathers one number a row and head
instead of a whole output (algorithm.md, section 4; BurstEngine drops O from the ring's backward
likewise).
"""

from __future__ import annotations

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.buffers import Kind, Piece
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.build.reduce import ReduceBy, Reduction, reduce_output, reduce_sum
from mesh_attention.plan.build.tile_pass import Queries, TilePass
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import Attend, AttendBackward, Call, MergeRule, Operation, Task


class TileForward(TilePass):
    direction = Direction.FORWARD
    merge_rule = MergeRule.SOFTMAX
    q_inputs = (Kind.Q,)
    q_reduce_kind = "RS-Q"
    kv_reduce_kind = None

    def q_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("out", Kind.OUT), ("lse", Kind.LSE))

    def kv_partials(self) -> tuple[tuple[str, Kind], ...]:
        return ()

    def attention(
        self,
        task: Task,
        queries: Queries,
        keys: tuple[Piece, Piece],
        q_sums: tuple[Piece, ...],
        kv_sums: tuple[Piece, ...],
        calls: tuple[Call, ...],
        fresh_q: bool,
        fresh_kv: bool,
    ) -> Operation:
        out, lse = q_sums
        return Attend(task, queries[Kind.Q], *keys, out, lse, calls, fresh_q)

    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]:
        partial = (f"out.{i}", f"lse.{i}")
        wire = self.wire(partial[0])
        out, lse = map(self.head_group.local, (Kind.OUT, Kind.LSE))
        return reduce_output(
            Task(self.q_reduce_kind, (i,)), reduction, partial=partial, wire=wire, out=out, lse=lse
        )


class TileBackward(TilePass):
    direction = Direction.BACKWARD
    merge_rule = MergeRule.SUM
    q_reduce_kind = "RS-dQ"
    kv_reduce_kind = "RS-dKV"

    def __init__(
        self,
        head_group: HeadGroup,
        tile: Tile,
        chunks: tuple[int, int],
        reduce_by: ReduceBy,
        *,
        gather_out: bool,
        slices: tuple[int, ...] = (1,),
    ) -> None:
        rest = Kind.OUT if gather_out else Kind.DELTA
        self.q_inputs = (Kind.Q, Kind.GRAD_OUT, Kind.LSE, rest)
        super().__init__(head_group, tile, chunks, reduce_by, slices=slices)

    def q_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("grad_q", Kind.GRAD_Q),)

    def kv_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("grad_k", Kind.GRAD_K), ("grad_v", Kind.GRAD_V))

    def attention(
        self,
        task: Task,
        queries: Queries,
        keys: tuple[Piece, Piece],
        q_sums: tuple[Piece, ...],
        kv_sums: tuple[Piece, ...],
        calls: tuple[Call, ...],
        fresh_q: bool,
        fresh_kv: bool,
    ) -> Operation:
        (grad_q,), (grad_k, grad_v) = q_sums, kv_sums
        return AttendBackward(
            task,
            queries[Kind.Q],
            *keys,
            queries[Kind.GRAD_OUT],
            queries[Kind.LSE],
            queries.get(Kind.OUT),
            queries.get(Kind.DELTA),
            grad_q,
            grad_k,
            grad_v,
            calls,
            fresh_q,
            fresh_kv,
        )

    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]:
        partial = f"grad_q.{i}"
        tensors = ((partial, self.wire(partial), self.head_group.local(Kind.GRAD_Q)),)
        return reduce_sum(Task(self.q_reduce_kind, (i,)), reduction, tensors)

    def reduce_kv(self, j: int, reduction: Reduction) -> list[Operation]:
        tensors = tuple(
            (f"{stem}.{j}", self.wire(f"{stem}.{j}"), self.head_group.local(kind))
            for stem, kind in self.kv_partials()
        )
        return reduce_sum(Task(self.kv_reduce_kind, (j,)), reduction, tensors)
