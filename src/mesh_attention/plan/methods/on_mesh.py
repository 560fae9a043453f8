"""What methods that stand on a mesh pass answer alike when `weave` asks."""

from __future__ import annotations

from mesh_attention.plan.buffers import Kind
from mesh_attention.plan.methods.mesh_pass import MeshPass
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.plan import Direction

__all__ = ["OnMesh"]


class OnMesh:
    def __init__(self, mesh: MeshPass) -> None:
        self._mesh = mesh

    @property
    def hold(self) -> int:
        return 0  # what wanders has two buffers, and goes when its attention is done

    @property
    def strand(self) -> Strand:
        return self._mesh.strand

    @property
    def direction(self) -> Direction:
        return self._mesh.direction

    @property
    def needs(self) -> tuple[Kind, ...]:
        return (*self._mesh.q_inputs, Kind.K, Kind.V)

    def groups(self) -> dict[str, tuple[int, ...]]:
        return self._mesh.groups()
