"""How the whole tensors of a plan, or of a batch of documents, lie on the ranks: one rank's view.

`ContextParallel` cuts, joins and numbers tokens by it, in the same way for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.prepared_call import CallOptions
from mesh_attention.runtime.session.sharding import take_shard, unshard
from mesh_attention.runtime.session.share import Share

Side = Literal["q", "kv"]


@dataclass(frozen=True)
class Shards:
    """
    devices    the place in the process group of each partition
    words      what other ranks compare with theirs
    starts     cumulative starts of the documents of queries and of keys
    num_rows   rows of a batch that are one pack here: tensors have one row, of all their tokens
    of_batch   another batch is shared out in another way
    """

    q_layout: Layout
    kv_layout: Layout
    rank: int
    devices: tuple[int, ...]
    words: str
    starts: tuple[tuple[int, ...], tuple[int, ...]]
    num_rows: int = 1
    of_batch: bool = False

    def layout(self, side: Side) -> Layout:
        if side not in ("q", "kv"):
            raise MeshAttentionError(f"side={side!r}: must be 'q' or 'kv'")
        return self.q_layout if side == "q" else self.kv_layout

    def shard(self, x: Tensor, dim: int, side: Side) -> Tensor:
        layout = self.layout(side)
        dim = _checked_dim(x, dim)
        length, tokens = x.shape[dim], layout.num_tokens // self.num_rows
        if length != tokens:
            again = length == layout.slots
            raise MeshAttentionError(
                f"shard wants all {tokens} tokens along dim {dim}, but it has {length}"
                + ("; it looks sharded already" if again else "")
            )
        return take_shard(self._as_one_row(x, dim), layout, self.rank, dim)

    def unshard(
        self, share: Share, options: CallOptions, x: Tensor, dim: int, side: Side
    ) -> Tensor:
        share.refuse_if_closed()
        layout = self.layout(side)
        dim = _checked_dim(x, dim)
        if x.shape[dim] != layout.slots:
            raise MeshAttentionError(
                f"unshard wants {layout.slots} slots along dim {dim}, but it has {x.shape[dim]}"
            )
        share.context.groups.check_device(x.device)
        whole = unshard(
            *(share, self.words, self.devices, self.rank, options, x, layout, dim),
            of_batch=self.of_batch,
        )
        if self.num_rows == 1:
            return whole
        tokens = layout.num_tokens // self.num_rows
        rows = (*whole.shape[: dim - 1], self.num_rows, tokens, *whole.shape[dim + 1 :])
        return whole.reshape(rows)

    def positions(self, side: Side, device: torch.device | str | None, *, restart: bool) -> Tensor:
        """In the whole; with `restart` in the document, where padding is at 0."""
        layout = self.layout(side)
        positions = layout.positions(self.rank)
        if restart:
            starts = np.array(self.starts[side == "kv"], dtype=np.int64)
            # Of documents that begin at the same token the last one has it.
            at = np.searchsorted(starts[:-1], positions, side="right") - 1
            positions = np.where(positions < layout.num_tokens, positions - starts[at], 0)
        found = torch.from_numpy(positions)
        return found if device is None else found.to(_checked_device(device))

    def padding(self, side: Side, device: torch.device | str | None) -> Tensor:
        positions = self.positions(side, device, restart=False)
        return positions >= self.layout(side).num_tokens

    def _as_one_row(self, x: Tensor, dim: int) -> Tensor:
        if self.num_rows == 1:
            return x
        if dim == 0 or x.shape[dim - 1] != self.num_rows:
            raise MeshAttentionError(
                f"these documents are those of {self.num_rows} rows, which become one: the "
                f"dimension before dim {dim} must be the rows, but the shape is {tuple(x.shape)}"
            )
        return x.flatten(dim - 1, dim).unsqueeze(dim - 1)


def _checked_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or isinstance(dim, bool) or not isinstance(dim, int):
        raise MeshAttentionError(
            f"give a tensor and a dimension, not {type(x).__name__} and {dim!r}"
        )
    if not -x.ndim <= dim < x.ndim:
        raise MeshAttentionError(f"dim={dim} is outside a tensor of {x.ndim} dimensions")
    return dim % x.ndim


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise MeshAttentionError(
            f"device={device!r}: give a torch.device that is here, or its name, such as 'cuda:0'"
        ) from None
