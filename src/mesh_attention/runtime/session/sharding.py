"""Cutting whole tensors into shards and putting them together again, by a layout.

The index maps are exact for any length: padding slots are filled with zeros on the way in and left
out on the way back.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.context import Context
from mesh_attention.runtime.session.prepared_call import CallOptions
from mesh_attention.runtime.session.share import Share
from mesh_attention.runtime.transport.distributed import CommunicationError
from mesh_attention.runtime.transport.torch_operations import all_gather


def take_shard(whole: Tensor, layout: Layout, partition: int, dim: int) -> Tensor:
    """The slots of one partition along `dim`; padding slots are zero."""
    positions = torch.from_numpy(layout.positions(partition)).to(whole.device)
    padding = positions >= layout.num_tokens
    shard = whole.index_select(dim, positions.clamp(max=layout.num_tokens - 1))
    if layout.padded_tokens == layout.num_tokens:
        return shard
    shape = [1] * whole.ndim
    shape[dim] = -1
    return shard.masked_fill(padding.view(shape), 0)


def join_shards(shards: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole tensor from the shards of all partitions in order, without padding."""
    joined = torch.cat(shards, dim=dim)
    places = torch.empty(layout.padded_tokens, dtype=torch.int64)
    for partition in range(layout.num_ranks):
        first = partition * layout.slots
        positions = torch.from_numpy(layout.positions(partition))
        places[positions] = torch.arange(first, first + layout.slots)
    return joined.index_select(dim, places[: layout.num_tokens].to(joined.device))


def rows_first(x_BSHD: Tensor) -> Tensor:
    """(rows, batch, heads, width), contiguous; no copy for a contiguous batch of one. Transports
    read memory, which in a negated view holds the opposite."""
    x = x_BSHD.resolve_neg() if x_BSHD.is_neg() else x_BSHD
    return x.transpose(0, 1).contiguous()


# Of gloo, whose error for others would end the process group; NCCL gathers little else.
_GATHERED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: Layout,
        devices: tuple[int, ...],
        rank: int,
        context: Context,
        timeout: timedelta | None,
        dim: int,
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, rank, dim
        own = x.resolve_conj().resolve_neg().contiguous()  # memory is what travels
        size = len(devices)
        gathered = own.new_empty((size * own.shape[0], *own.shape[1:])) if own.ndim else own
        if size == 1:
            return join_shards([own], layout, dim)
        try:
            group = context.groups.everybody(timeout)
            all_gather(gathered, own, group).wait()
        except (RuntimeError, dist.DistBackendError) as error:
            told = str(error).splitlines()[0]
            raise CommunicationError(f"the shards could not be gathered ({told})") from error
        context.guard.settle((gathered,))
        by_place = gathered.chunk(size)
        # Shards come in the order of our group; the layout counts partitions.
        ranks = [context.groups.ranks[device] for device in devices]
        places = [dist.get_group_rank(group, rank) for rank in ranks]
        return join_shards([by_place[place] for place in places], layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard = take_shard(grad, ctx.layout, ctx.rank, ctx.dim)
        return shard, None, None, None, None, None, None


def unshard(
    share: Share,
    words: str,
    devices: tuple[int, ...],
    rank: int,
    options: CallOptions,
    x: Tensor,
    layout: Layout,
    dim: int,
    *,
    of_batch: bool = False,
) -> Tensor:
    """The whole tensor from the shards of all ranks, which hand in the same kind of tensor.

    `words` say where it comes from; `devices` has the place of each partition in the group.
    """
    context = share.context
    kind = context.agree_on(
        {
            "plan": words,
            "unshard": layout.num_tokens,
            "dim": dim,
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "device": x.device.type,
        },
        options,
        ahead=of_batch,
    )
    if len(devices) > 1 and x.dtype not in _GATHERED:  # on all ranks: they agreed on it
        wider = torch.bfloat16 if x.dtype.is_floating_point else torch.int64
        raise MeshAttentionError(
            f"unshard: {dist.get_backend(context.groups.parent)} does not gather {x.dtype}; "
            f"convert it, as in x.to({wider}), and convert the whole tensor back"
        )
    share.begin(kind, "unshard", options, x.device)
    with context.guard.whole_or_broken():
        whole: Tensor = _Unshard.apply(x, layout, devices, rank, context, options.timeout, dim)  # type: ignore[no-untyped-call]
    return whole
