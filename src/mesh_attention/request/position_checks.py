"""Positions that a program gives to RoPE, held against those of its shards.

Shards that were cut in another way have other positions, and nothing else shows it: contiguous
ones, zigzag ones of each document as ring-flash-attention has them, or positions that each rank
counts from 0. The error names what they are.
"""

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
    """`own`: what the caller gave to `shard_batch` in place of positions that are counted."""
    layout = shards.layout(side)
    if not isinstance(position_ids, Tensor) or not position_ids.ndim:
        return MeshAttentionError("position_ids: give a tensor of (..., local tokens)")
    if position_ids.shape[-1] != layout.slots:
        return MeshAttentionError(
            f"position_ids have shape {tuple(position_ids.shape)}, and the shards of a rank have "
            f"{layout.slots} slots: give those of this rank, as positions() has them"
        )
    if own is not None and torch.equal(own.cpu(), position_ids.detach().cpu()):
        return None
    whole = layout.positions(shards.rank)
    real = whole < layout.num_tokens
    starts = shards.starts[side == "kv"]
    wanted = (whole[real], in_documents(whole, starts, layout.num_tokens)[real])
    for row in position_ids.detach().cpu().reshape(-1, layout.slots).numpy():
        if any(np.array_equal(row[real], positions) for positions in wanted):
            continue
        place = shards.devices[shards.rank]
        names = (n for n, x in _known(layout, starts, place) if np.array_equal(row[real], x[real]))
        name = next(names, "of no layout that is known here")
        return MeshAttentionError(
            f"position_ids are {name}, and shards lie in the {layout.kind} layout: cut tensors by "
            "shard or shard_batch and take positions() of the same object and documents; for "
            "shards that stay as they are say layout= or relayout=True where it is made"
        )
    return None


def _known(layout: Layout, starts: tuple[int, ...], rank: int) -> Iterator[tuple[str, Positions]]:
    """What people cut in place of a layout, with names; padding is counted on."""
    size, slots = layout.num_ranks, layout.slots
    padded = (*starts[:-1], size * slots)
    for kind in (LayoutKind.CONTIGUOUS, LayoutKind.ZIGZAG, LayoutKind.STRIPED):
        other = Layout(kind, size * slots, size)
        if other.slots == slots:
            positions = other.positions(rank)
            yield f"{kind}", positions
            yield f"{kind}, counted in each document", in_documents(positions, padded, size * slots)
    yield "counted from 0 on each rank", np.arange(slots)
    pieces = 2 * size
    if all((b - a) % pieces == 0 for a, b in pairwise(starts)) and starts[-1] == size * slots:
        of_each = [np.arange(a, b).reshape(pieces, -1) for a, b in pairwise(starts)]
        cut = np.concatenate([np.concatenate((x[rank], x[-1 - rank])) for x in of_each])
        name = "zigzag of each document, as ring-flash-attention cuts them"
        yield name, cut
        yield name, in_documents(cut, starts, starts[-1])
