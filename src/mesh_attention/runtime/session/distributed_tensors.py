"""DTensors, as tensor parallelism has them: what this rank holds of one, and a result as one again.

A DTensor is taken only where its part on this rank is all that a call needs, so that the result is
spread as it was: over heads in attention, over whatever is not the tokens where they are cut or
joined. Its mesh must have no other rank of the context-parallel group: those hold other tokens,
of which placements say nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.modes import constant_in_graphs

_MESH = "on a mesh that has no other rank of the context-parallel group"


@dataclass(frozen=True)
class Spread:
    """How the DTensors of a call lie on their mesh; without one, they were plain tensors. `fault`:
    why they are not taken, for all ranks to raise."""

    mesh: Any = None
    placements: tuple[Any, ...] = ()
    fault: MeshAttentionError | None = None

    def whole(self, x: Tensor, dim: int | None = None) -> Tensor:
        """A rank's part as a DTensor, sharded as those given, or over `dim` in their place."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Shard

        placements = self.placements if dim is None else [Shard(dim)] * self.mesh.ndim
        return DTensor.from_local(x, self.mesh, placements, run_check=False)


def is_dtensor(x: Any) -> bool:
    """Without the import, which takes its time and which most processes never need."""
    return isinstance(x, Tensor) and type(x).__name__ == "DTensor"


def own_heads(
    ranks: Collection[int], dim: int, sinks: Any = None, **tensors: Any
) -> tuple[list[Any], Any, Spread]:
    """(q, k and v, which come by their names, and sinks, as this rank holds them; how DTensors
    among them lie). Heads are along `dim`. `ranks` are those of the context-parallel group."""
    if not any(map(is_dtensor, tensors.values())):
        return [*map(_held, tensors.values())], sinks, Spread()
    first = next(x for x in tensors.values() if is_dtensor(x))
    dims = {name: (x, dim) for name, x in tensors.items()}
    if is_dtensor(sinks):  # plain ones are those of this rank's heads
        dims["sinks"] = (sinks, 0)
    fault = None
    for name, (x, at) in dims.items():
        if fault is None and not is_dtensor(x):
            fault = MeshAttentionError(
                f"{name} is a plain tensor and others are DTensors; give either for all of "
                f"{', '.join(tensors)}"
            )
        if fault is None and not (x.device_mesh == first.device_mesh and _fits(ranks, x, (at,))):
            fault = _refusal(
                name,
                x,
                "the plain torch.Tensor that this rank holds, with the placements that its "
                "gradient will have, x.to_local(grad_placements=...), or a DTensor that is "
                f"sharded evenly over heads, Shard({at}),",
            )
    spread = Spread(first.device_mesh, first.placements, fault)
    return [*map(_held, tensors.values())], _held(sinks), spread


def own_tokens(ranks: Collection[int], x: Any, dim: Any) -> tuple[Any, Spread]:
    """What this rank holds of a tensor that has tokens along `dim`, and how it lies."""
    if not is_dtensor(x) or not isinstance(dim, Integral) or not -x.ndim <= dim < x.ndim:
        return _held(x), Spread()
    way_out = (
        "x.full_tensor(), or a DTensor that is replicated or sharded evenly over another "
        f"dimension than {dim}"
    )
    if not _fits(ranks, x, {*range(x.ndim)} - {dim % x.ndim}, replicated=True):
        raise _refusal("x", x, way_out)
    return _held(x), Spread(x.device_mesh, x.placements)


def own_copies(
    ranks: Collection[int],
    way_out: str = "x.full_tensor(), or a DTensor that is replicated",
    /,
    **tensors: Any,
) -> list[Any]:
    """What this rank holds of tensors that must be whole on each rank."""
    for name, x in tensors.items():
        if is_dtensor(x) and not _fits(ranks, x, (), replicated=True):
            raise _refusal(name, x, way_out)
    return [*map(_held, tensors.values())]


def _held(x: Any) -> Any:
    """What this rank holds, and has received: collectives of tensor parallelism that no gradient
    goes through, as in evaluation, may be in flight."""
    own = x.to_local() if is_dtensor(x) else x
    if type(own).__name__ == "AsyncCollectiveTensor" and not own.requires_grad:
        return own.wait()
    return own


def _fits(
    ranks: Collection[int], x: Any, dims: Collection[int], *, replicated: bool = False
) -> bool:
    """Sharded over these dimensions, in equal parts, or replicated where that will do."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, parts = x.device_mesh, dict.fromkeys(range(x.ndim), 1)
    for size, placement in zip(mesh.shape, x.placements, strict=True):
        if type(placement) is Shard and placement.dim % x.ndim in dims:  # no kind derived from it
            parts[placement.dim % x.ndim] *= size
        elif not (replicated and type(placement) is Replicate):
            return False
    if any(x.shape[dim] % number for dim, number in parts.items()):
        return False
    return bool(_meets_only_here(mesh, tuple(ranks)))


@constant_in_graphs
def _meets_only_here(mesh: Any, ranks: tuple[int, ...]) -> bool:
    members = {*mesh.mesh.flatten().tolist()}
    return members & {*ranks} == {dist.get_rank()}


def _refusal(name: str, x: Any, way_out: str) -> MeshAttentionError:
    return MeshAttentionError(
        f"{name} is a DTensor; give {way_out} {_MESH}; this one of {tuple(x.shape)} is "
        f"{_described(x.device_mesh, x.placements)}"
    )


@constant_in_graphs
def _described(mesh: Any, placements: tuple[Any, ...]) -> str:
    words = ", ".join(map(repr, placements))
    return f"({words}) on the ranks {mesh.mesh.flatten().tolist()}"
