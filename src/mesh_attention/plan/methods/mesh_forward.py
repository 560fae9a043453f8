"""The forward pass of the mesh: gather Q and KV, attend, bring partial outputs home."""

from __future__ import annotations

from mesh_attention.plan.buffers import Kind
from mesh_attention.plan.home import Home, bring_output_home
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import Attend, Call, Operation

__all__ = ["MeshForward"]


class MeshForward(MeshPass):
    direction = Direction.FORWARD
    q_inputs = (Kind.Q,)
    q_return = "RS-Q"
    kv_return = None

    def q_partials(self) -> tuple[tuple[str, Kind], ...]:
        return (("out", Kind.OUT), ("lse", Kind.LSE))

    def kv_partials(self) -> tuple[tuple[str, Kind], ...]:
        return ()

    def compute(
        self, i: int, j: int, calls: tuple[Call, ...], fresh_q: bool, fresh_kv: bool
    ) -> Operation:
        return Attend(
            f"C-{i}-{j}",
            q=self.q_piece("q", i),
            k=self.kv_piece("k", j),
            v=self.kv_piece("v", j),
            out=self.q_partial("out", i),
            lse=self.q_partial("lse", i),
            calls=calls,
            fresh=fresh_q,
        )

    def return_q(self, i: int, home: Home) -> list[Operation]:
        partial = (f"out.{i}", f"lse.{i}")
        wire = self.wire(partial[0])
        name = f"{self.q_return}-{i}"
        out, lse = map(self.strand.local, (Kind.OUT, Kind.LSE))
        return bring_output_home(name, home, partial=partial, wire=wire, out=out, lse=lse)
