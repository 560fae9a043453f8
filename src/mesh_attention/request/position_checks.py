"""Compares the positions that a program gives to RoPE with those of its shards: nothing else shows
that shards were cut in another way. The error names the layout of the positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.runtime.session.sharding import Shards, Side, in_documents

Positions = NDArray[np.int64]


def fault_of_positions(
    shards: Shards, side: Side, position_ids: Any, own: Tensor | None = None
) -> MeshAttentionError | None:
    """`own`: positions that the caller gave to `shard_batch`, which are then right too."""
    layout, starts = shards.layout(side), shards.starts[side == "kv"]
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1:] != (layout.slots,):
        return MeshAttentionError(
            f"position_ids: give a tensor of (..., {layout.slots}), with a position for each slot "
            "of this rank, as positions() has them"
        )
    rows = position_ids.detach().cpu()
    if own is not None and torch.equal(own.cpu(), rows):
        return None
    right = layout.positions(shards.rank)
    real = right < layout.num_tokens

    def equal(row: Positions, positions: Positions) -> bool:
        """Positions may count in the whole or in each document; those of padding do not matter."""
        ways = positions, in_documents(positions, starts, layout.num_tokens)
        return any(np.array_equal(row[real], way[real]) for way in ways)

    for row in rows.reshape(-1, layout.slots).numpy():
        if not equal(row, right):
            others = other_ways(layout, starts, shards.rank)
            name = next((name for name, x in others if equal(row, x)), "of no layout known here")
            return MeshAttentionError(
                f"position_ids are {name}, and shards lie in the {layout.kind} layout: cut tensors "
                "by shard or shard_batch and take positions() of the same object and documents; "
                "where shards must stay as they are, say layout= or relayout=True to the object"
            )
    return None


def other_ways(
    layout: Layout, starts: tuple[int, ...], rank: int
) -> Iterator[tuple[str, Positions]]:
    """Names of usual ways to cut tensors, and this rank's positions under each."""
    size, slots = layout.num_ranks, layout.slots
    for kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG, LayoutKind.STRIPED):
        other = Layout(kind, size * slots, size)
        if other.slots == slots:
            yield kind.value, other.positions(rank)
    yield "counted from 0 on each rank", np.arange(slots)
    if starts[-1] == size * slots and not any((b - a) % (2 * size) for a, b in pairwise(starts)):
        pieces = [np.arange(a, b).reshape(2 * size, -1) for a, b in pairwise(starts)]
        rows = [of_each[at] for of_each in pieces for at in (rank, -1 - rank)]
        yield "zigzag of each document, as ring-flash-attention cuts them", np.concatenate(rows)
