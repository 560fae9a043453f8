"""Whole tensors from the shards of all ranks, for `ContextParallel.unshard`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.plan.layout import Layout
from mesh_attention.runtime.collectives import all_gather
from mesh_attention.runtime.sharding import join_shards, take_shard

__all__ = ["unshard"]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: Layout,
        devices: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup,
        dim: int,
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, rank, dim
        own = x.contiguous()
        size = len(devices)
        gathered = own.new_empty((size * own.shape[0], *own.shape[1:])) if own.ndim else own
        all_gather(gathered, own, group).wait()
        by_device = gathered.chunk(size)
        # Devices come in the group's order; the layout counts partitions.
        return join_shards([by_device[device] for device in devices], layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return take_shard(grad, ctx.layout, ctx.rank, ctx.dim), None, None, None, None, None


def unshard(
    x: Tensor,
    layout: Layout,
    devices: tuple[int, ...],
    rank: int,
    group: dist.ProcessGroup,
    dim: int,
) -> Tensor:
    whole: Tensor = _Unshard.apply(x, layout, devices, rank, group, dim)  # type: ignore[no-untyped-call]
    return whole
