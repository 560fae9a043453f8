"""The backward pass of the mesh: gather Q, dO and statistics, and KV; sum gradients at home.

With `delta` in place of O the Q group gathers one number a row and head instead of a whole output
(algorithm.md, section 4; BurstEngine drops O from the ring's backward in the same way).
"""

from __future__ import annotations

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.buffers import Kind
from mesh_attention.plan.home import Home, Route, bring_sum_home
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import AttendBackward, Call, Operation

__all__ = ["MeshBackward"]


class MeshBackward(MeshPass):
    direction = Direction.BACKWARD
    q_return = "RS-dQ"
    kv_return = "RS-dKV"

    def __init__(
        self,
        strand: Strand,
        tile: Tile,
        chunks: tuple[int, int],
        route: Route,
        *,
        gather_out: bool,
        slices: tuple[int, ...] = (1,),
    ) -> None:
        self.gather_out = gather_out
        rest = Kind.OUT if gather_out else Kind.DELTA
        self.q_inputs = (Kind.Q, Kind.GRAD_OUT, Kind.LSE, rest)
        super().__init__(strand, tile, chunks, route, slices=slices)

    def q_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("grad_q", Kind.GRAD_Q),)

    def kv_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("grad_k", Kind.GRAD_K), ("grad_v", Kind.GRAD_V))

    def compute(
        self, i: int, j: int, calls: tuple[Call, ...], fresh_q: bool, fresh_kv: bool
    ) -> Operation:
        return AttendBackward(
            f"C-{i}-{j}",
            q=self.q_piece("q", i),
            k=self.kv_piece("k", j),
            v=self.kv_piece("v", j),
            grad_out=self.q_piece("grad_out", i),
            lse=self.q_piece("lse", i),
            out=self.q_piece("out", i) if self.gather_out else None,
            delta=None if self.gather_out else self.q_piece("delta", i),
            grad_q=self.q_partial("grad_q", i),
            grad_k=self.kv_partial("grad_k", j),
            grad_v=self.kv_partial("grad_v", j),
            calls=calls,
            fresh_q=fresh_q,
            fresh_kv=fresh_kv,
        )

    def return_q(self, i: int, home: Home) -> list[Operation]:
        partial = f"grad_q.{i}"
        tensors = ((partial, self.wire(partial), self.strand.local(Kind.GRAD_Q)),)
        return bring_sum_home(f"{self.q_return}-{i}", home, tensors)

    def return_kv(self, j: int, home: Home) -> list[Operation]:
        tensors = tuple(
            (f"{stem}.{j}", self.wire(f"{stem}.{j}"), self.strand.local(kind))
            for stem, kind in self.kv_partials()
        )
        return bring_sum_home(f"{self.kv_return}-{j}", home, tensors)
