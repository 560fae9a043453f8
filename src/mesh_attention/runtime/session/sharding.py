"""Cutting whole tensors into shards and putting them together again, by a layout.

`ContextParallel` shards, unshards and numbers tokens by `Shards`, for plans and for batches. The
index maps are exact for any length: padding slots are filled with zeros on the way in and left
out on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import flag
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.agreement.identity import AgreedKind, BatchIdentity
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.collective_call import collective_call
from mesh_attention.runtime.session.layouts import (
    KNOWN_LAYOUTS,
    document_of,
    in_documents,
    join_shards,
    same_rows,
    take_shard,
)
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.session import Session, User
from mesh_attention.runtime.transport.distributed import all_gather, communicating

Side = Literal["q", "kv"]
Grad = Literal["sum", "mean", "own"]
_NOTED = 4  # layouts of documents with the same bounds


# Of gloo, whose error for others would end the process group; NCCL gathers little else.
_GATHERED = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class _Join:
    """What both passes of one call of `unshard` need besides the tensor."""

    user: User
    options: CallOptions
    kind: AgreedKind
    shards: Shards
    layout: Layout
    dim: int
    grad: Grad | None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, join: _Join) -> Tensor:
        session = join.user.session
        ctx.join, ctx.place = join, session.guard.place
        own = x.resolve_conj().resolve_neg().contiguous()  # memory is what travels
        size = join.layout.num_ranks
        if size == 1:
            return join_shards([own], join.layout, join.dim)
        gathered = own.new_empty((size * own.shape[0], *own.shape[1:]))
        with communicating("the shards could not be gathered"):
            group = session.groups.everybody()
            all_gather(gathered, own, group).wait()
        session.guard.settle((gathered,))
        by_place = gathered.chunk(size)
        # Shards come in the order of our group; the layout counts in that of the caller's.
        places = [dist.get_group_rank(group, rank) for rank in session.groups.ranks]
        return join_shards([by_place[place] for place in places], join.layout, join.dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        join = ctx.join
        whole = grad if join.grad == "own" else _of_all_ranks(ctx, grad)
        return take_shard(whole, join.layout, join.shards.rank, join.dim), None


@collective_call(lambda ctx, _: (ctx.join.user.session, ctx.join.options))
def _of_all_ranks(ctx: Any, grad: Tensor) -> Tensor:
    """The gradients that ranks have of the whole tensor, added up, or their mean."""
    join, session = ctx.join, ctx.join.user.session
    if join.grad is None:
        raise MeshAttentionError(
            "a loss depends on unshard(...), but 'grad' is missing: it defines the gradient of the "
            "shards. If all ranks compute the same loss: grad='sum' under DDP or FSDP2, "
            "which divide by the number of ranks; grad='mean' or grad='own' if gradients of "
            "parameters are added up. Without a gradient: unshard(x.detach(), ...)"
        )
    if torch.is_grad_enabled():
        raise MeshAttentionError(
            "second derivatives of unshard are supported with grad='own' alone; call with "
            "create_graph=False"
        )
    join.user.refuse_if_closed()
    whole, size = grad.clone(memory_format=torch.contiguous_format), join.layout.num_ranks
    join.user.begin(join.kind, "backward of unshard", join.options, grad.device, of=ctx.place)
    with session.guard.whole_or_broken():
        if size > 1:
            with communicating("the gradients could not be added up"):
                dist.all_reduce(whole, group=session.groups.everybody())
            session.guard.settle((whole,))
    return whole if join.grad == "sum" else whole.div_(size)


@dataclass(frozen=True)
class Shards:
    """How whole tensors of a plan, or of a batch of documents, lie on the ranks: one rank's view.

    rank       the place of this rank in the process group
    words      what ranks compare of it
    starts     where documents start, and where the last one ends, of queries and of keys
    num_rows   how many rows of a batch are one row here, of all their tokens
    of_batch   whether another batch is shared out in another way
    batch      whose tensors these are, where that is known
    """

    q_layout: Layout
    kv_layout: Layout
    rank: int
    words: str
    starts: tuple[tuple[int, ...], tuple[int, ...]]
    num_rows: int = 1
    of_batch: bool = False
    batch: BatchIdentity | None = None

    @staticmethod
    def of(rank_plan: RankPlan) -> Shards:
        plan, mask = rank_plan.plan, rank_plan.plan.problem.mask
        starts = mask.documents or (0, plan.problem.q_tokens)
        kv_starts = mask.kv_documents or mask.documents or (0, plan.problem.keys)
        return Shards(*rank_plan.shards, rank_plan.place, rank_plan.words, (starts, kv_starts))

    def layout(self, side: Side) -> Layout:
        if not isinstance(side, str) or side not in ("q", "kv"):
            raise MeshAttentionError(f"side={side!r}: must be 'q' or 'kv'")
        return self.q_layout if side == "q" else self.kv_layout

    def note(self, session: Session) -> None:
        """For a caller that cuts or numbers tensors by these: calls with other documents of the
        same bounds are held against it (`port_checks.py`)."""
        layouts = self.q_layout, self.kv_layout
        for layout, starts in zip(layouts, self.starts, strict=True):
            others = [x for x in session.asked_layouts.find(starts) or () if x != layout]
            session.asked_layouts.keep(starts, (*others[-_NOTED:], layout))

    def shard(self, x: Tensor, dim: int, side: Side) -> Tensor:
        layout = self.layout(side)
        dim = _checked_dim(x, dim)
        length, tokens = x.shape[dim], layout.num_tokens // self.num_rows
        if length != tokens:
            again = length == layout.slots
            raise MeshAttentionError(
                f"shard wants all {tokens} tokens along dim {dim}, but it has {length} in x of "
                f"shape {tuple(x.shape)}" + ("; it looks sharded already" if again else "")
            )
        return take_shard(self._as_one_row(x, dim), layout, self.rank, dim)

    def unshard(
        self,
        user: User,
        options: CallOptions,
        x: Tensor,
        dim: int,
        side: Side,
        grad: Grad | None,
        label: str | int | None,
    ) -> Tensor:
        """The whole tensor from the shards of all ranks, which hand in the same kind of tensor."""
        user.refuse_if_closed()
        if not isinstance(grad, str | None) or grad not in (None, *get_args(Grad)):
            raise MeshAttentionError(f"grad={grad!r}: must be one of {', '.join(get_args(Grad))}")
        layout = self.layout(side)
        dim = _checked_dim(x, dim)
        if x.shape[dim] != layout.slots:
            raise MeshAttentionError(
                f"unshard wants {layout.slots} slots along dim {dim}, but it has {x.shape[dim]}"
            )
        cut, *along = KNOWN_LAYOUTS.of(x) or (layout, None)
        if along == [user.session.groups.ranks, x.stride(dim)] and not same_rows(cut, layout):
            raise MeshAttentionError(
                f"x lies in the {cut.kind} layout of {cut.num_tokens} tokens, and unshard joins "
                f"{layout.num_tokens} tokens in the {layout.kind} layout: call unshard of the "
                "object that cut it, with the documents= that shard and attention had"
            )
        session = user.session
        session.groups.check_device(x.device)
        statement = {
            "plan": self.words,
            "unshard": layout.num_tokens,
            "dim": dim,
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "device": x.device.type,
            "grad": grad,
        }
        kind = session.calls.agree_on(statement, options, ahead=self.of_batch)
        if layout.num_ranks > 1 and x.dtype not in _GATHERED:  # on all ranks: they agreed on it
            wider = torch.bfloat16 if x.dtype.is_floating_point else torch.int64
            raise MeshAttentionError(
                f"unshard: {session.groups.backend} does not gather {x.dtype}; "
                f"convert it, as in x.to({wider}), and convert the whole tensor back"
            )
        user.begin(kind, "unshard", options, x.device, label, batch=self.batch)
        join = _Join(user, options, kind, self, layout, dim, grad)
        with session.guard.whole_or_broken():
            whole: Tensor = _Unshard.apply(x, join)  # type: ignore[no-untyped-call]
        if self.num_rows == 1:
            return whole
        tokens = layout.num_tokens // self.num_rows
        rows = (*whole.shape[: dim - 1], self.num_rows, tokens, *whole.shape[dim + 1 :])
        return whole.reshape(rows)

    def positions(self, side: Side, device: torch.device | str | None, *, restart: bool) -> Tensor:
        """Where each slot's token is in the whole sequence; with `restart` in its document, where
        padding is at 0."""
        layout = self.layout(side)
        positions = layout.positions(self.rank)
        if flag("restart", restart):
            positions = in_documents(positions, self.starts[side == "kv"], layout.num_tokens)
        tensor = torch.from_numpy(positions)
        return tensor if device is None else tensor.to(_checked_device(device))

    def documents(self, side: Side) -> NDArray[np.int64]:
        """The number of the document of each slot; padding has the number after the last."""
        layout, starts = self.layout(side), self.starts[side == "kv"]
        positions = layout.positions(self.rank)
        at = document_of(positions, starts)
        return np.where(positions < layout.num_tokens, at, len(starts) - 1)

    def padding(self, side: Side, device: torch.device | str | None) -> Tensor:
        """True for each slot that holds no token."""
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
    if not isinstance(x, Tensor) or isinstance(dim, bool) or not isinstance(dim, Integral):
        raise MeshAttentionError(
            f"give a tensor and a dimension, not {type(x).__name__} and {dim!r}"
        )
    dim = int(dim)
    if not -x.ndim <= dim < x.ndim:
        raise MeshAttentionError(f"dim={dim} is outside a tensor of {x.ndim} dimensions")
    return dim % x.ndim


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        raise MeshAttentionError(
            f"device={device!r}: give a torch.device that is here, or its name, such as 'cuda:0'"
        ) from None
