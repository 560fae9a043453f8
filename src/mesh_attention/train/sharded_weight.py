"""The weight of a head as FSDP2 has it outside of forward: in parts, on ranks with other tokens.

It is gathered for the call, in the dtype of the hidden states, and its gradient is reduced to the
parts as FSDP2 reduces those of other parameters, to which it is added where the weight is tied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.operators import need_grad
from mesh_attention.runtime.session.distributed_tensors import (
    described,
    is_dtensor,
    meets_only_here,
    own_copies,
)
from mesh_attention.train.means import Reduce


def own_weights(
    ranks: Collection[int],
    hidden: Tensor,
    reduce: Reduce | None,
    meet: Callable[[DeviceMesh, torch.device], None] | None = None,
    **tensors: Any,
) -> list[Any]:
    """Whole weight and bias. `reduce`: what becomes of the gradients of those that are gathered;
    `meet`: called before that, where all ranks are to come."""
    mesh = _mesh_of_fsdp(ranks, **tensors)
    if mesh is None:
        return own_copies(ranks, **tensors)
    if reduce is None and need_grad(*tensors.values()):
        raise MeshAttentionError(
            "the weight is sharded by FSDP2: say reduce='fsdp' if gradients are averaged over its "
            "ranks, reduce='sum' if they are added up"
        )
    if meet is not None:
        meet(mesh, hidden.device)
    divisor = 1 if reduce == "sum" else mesh.size()
    for name, x in tensors.items():
        if is_dtensor(x) and x.device_mesh == mesh:
            tensors[name] = _Gathered.apply(x, hidden.dtype, divisor)  # type: ignore[no-untyped-call]
    return own_copies(ranks, **tensors)


def _mesh_of_fsdp(ranks: Collection[int], **tensors: Any) -> DeviceMesh | None:
    """Of weight and bias, where ranks of the context-parallel group have parts of them. On other
    meshes parts may belong to tensor parallelism, whose ranks have the same tokens."""
    meshes: list[DeviceMesh] = []
    for name, x in tensors.items():
        if is_dtensor(x) and not meets_only_here(x.device_mesh, tuple(ranks)):
            if not _is_of_fsdp(x, ranks) or (meshes and meshes[0] != x.device_mesh):
                raise MeshAttentionError(
                    f"{name} is a DTensor, {described(x.device_mesh, x.placements)}, and not as "
                    "fully_shard alone leaves parameters, Shard(0) over a mesh dimension with the "
                    f"whole context-parallel group {[*ranks]}: call this in the forward of the "
                    "module that fully_shard wraps, where they are whole; without gradients "
                    f"{name}.full_tensor() will do"
                )
            meshes.append(x.device_mesh)
    return meshes[0] if meshes else None


def _is_of_fsdp(x: Any, ranks: Collection[int]) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    mesh, along = x.device_mesh, [type(p) is not Replicate for p in x.placements]
    if sum(along) != 1 or x.placements[along.index(True)] != Shard(0):
        return False
    here = mesh.get_coordinate()
    line = mesh.mesh[tuple(slice(None) if a else i for a, i in zip(along, here, strict=True))]
    return {*ranks} <= {*line.tolist()}


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dtype: torch.dtype, divisor: int) -> Tensor:
        from torch.distributed.tensor import DTensor

        ctx.x, ctx.divisor = x, divisor
        how = (x.device_mesh, x.placements)
        part = x.to_local().to(dtype)
        parts = DTensor.from_local(part, *how, run_check=False, shape=x.shape, stride=x.stride())
        return parts.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        from torch.distributed.tensor import DTensor, Partial

        x = ctx.x
        if x.is_cuda and x.is_leaf and x.grad is not None:
            # To which FSDP2 may be adding on a stream that nobody waits for before the end.
            torch.cuda.synchronize(x.device)
        mesh = x.device_mesh
        summands = DTensor.from_local(
            grad.to(x.dtype), mesh, [Partial()] * mesh.ndim, run_check=False
        )
        return summands.redistribute(placements=x.placements) / ctx.divisor, None, None
