"""The weight of a head as FSDP2 has it outside of forward: in parts, on ranks with other tokens.

It is gathered for the call, in the dtype of the hidden states (its own under autocast), and its
gradient is reduced to the parts as FSDP2 reduces those of other parameters, to which it is added
where the weight is tied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.operators import need_grad
from mesh_attention.runtime.session.distributed_tensors import is_dtensor, own_copies
from mesh_attention.train.means import LossRanks, Means, Reduce


def own_weights(
    ranks: Collection[int],
    hidden: Tensor,
    reduce: Reduce | None,
    means: Means | None = None,
    **tensors: Any,
) -> list[Any]:
    """Whole weight and bias. `reduce`: what becomes of the gradients of those that are gathered;
    `means`: of the loss, if ranks make it together."""
    of_loss = None if means is None else means.ranks
    parts = {name: x for name, x in tensors.items() if _is_of_fsdp(x, ranks, of_loss)}
    others = {name: x for name, x in tensors.items() if name not in parts}
    whole = dict(zip(others, own_copies(ranks, _WAYS_OUT, **others), strict=True))
    if reduce is None and need_grad(*parts.values()):
        raise MeshAttentionError(
            "the weight is sharded by FSDP2: say reduce='fsdp' if gradients are averaged over its "
            "ranks, reduce='sum' if they are added up"
        )
    for mesh in dict.fromkeys(x.device_mesh for x in parts.values()):
        if means is not None:
            means.meet_before_gathering(mesh, hidden.device)
    for name, x in parts.items():
        divisor = 1 if reduce == "sum" else x.device_mesh.size()
        autocast = torch.is_autocast_enabled(hidden.device.type)  # which takes any dtype
        dtype = x.dtype if autocast else hidden.dtype
        whole[name] = _Gathered.apply(x, dtype, divisor)  # type: ignore[no-untyped-call]
    return [whole[name] for name in tensors]


# Gathered by `full_tensor`, gradients of ranks with other tokens would be added up by nobody.
_WAYS_OUT = (
    "it whole, as it is in the forward of the module that fully_shard wraps; or x.full_tensor() if "
    "ranks of its mesh have the same tokens (tensor parallelism) or it needs no gradient; or a "
    "DTensor that is Shard(0) over the whole context-parallel group (FSDP2), or replicated"
)


def _is_of_fsdp(x: Any, ranks: Collection[int], of_loss: LossRanks | None) -> bool:
    """Sharded along one dimension of its mesh, over ranks with other tokens: the whole group, or
    all ranks of the loss. On other meshes parts may belong to tensor parallelism."""
    if not is_dtensor(x):
        return False
    from torch.distributed.tensor import Replicate, Shard

    mesh, along = x.device_mesh, [type(p) is not Replicate for p in x.placements]
    if sum(along) != 1 or x.placements[along.index(True)] != Shard(0):
        return False
    if of_loss is not None and mesh.size() == of_loss.number > 1:
        return of_loss.known <= {*mesh.mesh.flatten().tolist()}
    here = mesh.get_coordinate()
    line = mesh.mesh[tuple(slice(None) if a else i for a, i in zip(along, here, strict=True))]
    return len(ranks) > 1 and {*ranks} <= {*line.tolist()}


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
