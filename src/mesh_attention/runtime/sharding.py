"""Cutting whole tensors into shards and putting them together again, by a layout.

The index maps are exact for any length: padding slots are filled with zeros on the way in and left
out on the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.plan.layout import Layout

__all__ = ["join_shards", "rows_first", "take_shard"]


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
    """(rows, batch, heads, width), contiguous; no copy for a contiguous batch of one."""
    return x_BSHD.transpose(0, 1).contiguous()
