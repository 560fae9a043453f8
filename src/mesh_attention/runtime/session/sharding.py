"""Cutting whole tensors into shards and putting them together again, by a layout.

`ContextParallel` shards, unshards and numbers tokens by `Shards`, for plans and for batches. The
index maps are exact for any length: padding slots are filled with zeros on the way in and left
out on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.session import Session, User
from mesh_attention.runtime.transport.distributed import CommunicationError
from mesh_attention.runtime.transport.torch_operations import all_gather

Side = Literal["q", "kv"]


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
        session: Session,
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
            group = session.groups.everybody(timeout)
            all_gather(gathered, own, group).wait()
        except (RuntimeError, dist.DistBackendError) as error:
            first_line = str(error).splitlines()[0]
            raise CommunicationError(f"the shards could not be gathered ({first_line})") from error
        session.guard.settle((gathered,))
        by_place = gathered.chunk(size)
        # Shards come in the order of our group; the layout counts partitions.
        ranks = [session.groups.ranks[device] for device in devices]
        places = [dist.get_group_rank(group, rank) for rank in ranks]
        return join_shards([by_place[place] for place in places], layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard = take_shard(grad, ctx.layout, ctx.rank, ctx.dim)
        return shard, None, None, None, None, None, None


def unshard(
    user: User,
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
    session = user.session
    kind = session.calls.agree_on(
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
            f"unshard: {dist.get_backend(session.groups.parent)} does not gather {x.dtype}; "
            f"convert it, as in x.to({wider}), and convert the whole tensor back"
        )
    user.begin(kind, "unshard", options, x.device)
    with session.guard.whole_or_broken():
        whole: Tensor = _Unshard.apply(x, layout, devices, rank, session, options.timeout, dim)  # type: ignore[no-untyped-call]
    return whole


@dataclass(frozen=True)
class Shards:
    """How whole tensors of a plan, or of a batch of documents, lie on the ranks: one rank's view.

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
        if not isinstance(side, str) or side not in ("q", "kv"):
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

    def unshard(self, user: User, options: CallOptions, x: Tensor, dim: int, side: Side) -> Tensor:
        user.refuse_if_closed()
        layout = self.layout(side)
        dim = _checked_dim(x, dim)
        if x.shape[dim] != layout.slots:
            raise MeshAttentionError(
                f"unshard wants {layout.slots} slots along dim {dim}, but it has {x.shape[dim]}"
            )
        user.session.groups.check_device(x.device)
        whole = unshard(
            user,
            self.words,
            self.devices,
            self.rank,
            options,
            x,
            layout,
            dim,
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
        if flag("restart", restart):
            starts = np.array(self.starts[side == "kv"], dtype=np.int64)
            # Of documents that begin at the same token the last one has it.
            at = np.searchsorted(starts[:-1], positions, side="right") - 1
            positions = np.where(positions < layout.num_tokens, positions - starts[at], 0)
        tensor = torch.from_numpy(positions)
        return tensor if device is None else tensor.to(_checked_device(device))

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
