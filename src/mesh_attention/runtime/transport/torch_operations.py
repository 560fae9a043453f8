"""Calls of torch.distributed on their tensors, ready to begin.

Beginning one adds the works that are then in flight, and the copies that must follow them. Copies
and landing places are made only where the library cannot read or write a tensor as it lies.

The messages of an exchange are found once for an operation. In an exchange of heads, pieces for
several members that follow each other in the same rows are one piece, which one copy packs or
unpacks: launches cost more than such copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport.interface import Transfers, View

Works = list[Any]
Copies = list[Callable[[], object]]
Begin = Callable[[Works, Copies], None]


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Asynchronous; returns the work. torch 2.13 renames it and warns on the old name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=group, async_op=True)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)


class PointToPoint(NamedTuple):
    """A tensor to or from another rank, or equal ones of several ranks in a first dimension: one
    call copies them all. Both sides number what is between them alike."""

    tensor: Tensor
    peers: tuple[int, ...]
    tag: int
    sent: bool


def exchange(
    tensors: Sequence[PointToPoint],
    own: Sequence[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
    *,
    host_driven: bool,
) -> Begin:
    """Tensors that travel together, and `own` ones, (source, target), that a rank keeps."""
    # Receives first: gloo sends once it hears that the other side receives, and would hear it
    # behind all that the other side sends itself. NCCL goes by the order between two ranks.
    tensors = sorted(tensors, key=lambda message: (message.sent, message.tag))
    # gloo's point-to-point reads host memory only; its collectives take CUDA tensors.
    usable = [x.is_contiguous() and not (host_driven and x.is_cuda) for x, *_ in tensors]

    def operations(finish: Copies) -> list[dist.P2POp]:
        made: list[dist.P2POp] = []
        for (tensor, peers, tag, sent), as_it_lies in zip(tensors, usable, strict=True):
            x = tensor
            if not as_it_lies:
                device = "cpu" if host_driven else x.device
                x = torch.empty(x.shape, dtype=x.dtype, device=device)
                if sent:
                    x.copy_(tensor)
                else:
                    finish.append(partial(tensor.copy_, x))
            for part, peer in zip((x,) if len(peers) == 1 else x, peers, strict=True):
                made.append(dist.P2POp(dist.isend if sent else dist.irecv, part, peer, group, tag))
        return made

    ready = operations([]) if all(usable) else None

    def begin(works: Works, finish: Copies) -> None:
        if posted := operations(finish) if ready is None else ready:
            works += dist.batch_isend_irecv(posted)
        for source, target in own:
            target.copy_(source)

    return begin


class CollectiveRows(NamedTuple):
    """One stretch of a collective. `rows` holds equal rows for each member; `order[member]` is the
    member's place in the group. They can be used as they lie if that is the order of the group."""

    part: Tensor
    rows: Tensor
    group: dist.ProcessGroup
    order: Sequence[int]

    @property
    def usable(self) -> bool:
        return list(self.order) == sorted(self.order) and self.rows.is_contiguous()

    def by_member(self, in_order_of_group: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of each member, and those of a tensor in the order of the process group."""
        size = len(self.order)
        places = in_order_of_group.tensor_split(size)
        return zip(self.rows.tensor_split(size), [places[at] for at in self.order], strict=True)


def gather(stretch: CollectiveRows, works: Works, finish: Copies) -> None:
    part, rows, group, _ = stretch
    own = part.contiguous()  # a slice of rows is contiguous; of heads it is not
    if stretch.usable:
        works.append(all_gather(rows, own, group))
        return
    landing = torch.empty_like(rows, memory_format=torch.contiguous_format)
    works.append(all_gather(landing, own, group))
    finish += [partial(target.copy_, landed) for target, landed in stretch.by_member(landing)]


def reduce(stretch: CollectiveRows, works: Works, finish: Copies) -> None:
    part, whole, group, _ = stretch
    own = part.contiguous()
    if not stretch.usable:
        whole = torch.empty_like(whole, memory_format=torch.contiguous_format)
        for rows, place in stretch.by_member(whole):
            place.copy_(rows)
    works.append(reduce_scatter(own, whole, group))
    if own is not part and own.data_ptr() != part.data_ptr():
        finish.append(partial(part.copy_, own))


def reduce_by_messages(stretch: CollectiveRows, works: Works, finish: Copies) -> None:
    """Over gloo: each member sends the others their rows and adds up what it gets, wide. gloo's own
    in PyTorch is an all-reduce, with twice the bytes."""
    part, whole, group, order = stretch
    landing = torch.empty((len(order), *part.shape), dtype=part.dtype, device="cpu")
    own: list[tuple[Tensor, Tensor]] = []
    tensors: list[PointToPoint] = []
    for place, rows, target in zip(order, whole.tensor_split(len(order)), landing, strict=True):
        if place == dist.get_rank(group):
            own.append((rows, target))
            continue
        peers = (dist.get_global_rank(group, place),)
        tensors += [PointToPoint(target, peers, 0, False), PointToPoint(rows, peers, 0, True)]
    exchange(tensors, own, group, host_driven=True)(works, finish)
    wide = torch.promote_types(part.dtype, torch.float32)
    finish.append(lambda: part.copy_(landing.sum(0, dtype=wide)))


def gathers_by_messages(size: int, *, host_driven: bool) -> bool:
    """Whether an all-gather of so many ranks is an exchange. gloo's own (`host_driven`) sends
    before it says that it receives: the two directions of two ranks would take turns."""
    return host_driven and size == 2


class Message(NamedTuple):
    """`tag`: its number between two ranks, the same on both sides."""

    piece: Piece  # of all its members, in heads of their order
    members: tuple[int, ...]
    tag: int
    sent: bool

    def tensor(self, view: View) -> Tensor:
        """By member in a first dimension, where there are several."""
        rows = view(self.piece)
        if len(self.members) == 1:
            return rows
        num_rows, batch, heads, width = rows.shape
        each = heads // len(self.members)
        return rows.view(num_rows, batch, len(self.members), each, width).movedim(2, 0)


class Messages(NamedTuple):
    between: tuple[Message, ...]  # this member and others
    own: tuple[tuple[Piece, Piece], ...]  # what stays: from where to where


def messages(moved: Transfers, me: int) -> Messages:
    """Of one member of the group."""
    single = [
        Message(piece, (member,), tag, sent)
        for sent, by_member in ((False, moved.receives), (True, moved.sends))
        for member, pieces in enumerate(by_member)
        if member != me
        for tag, piece in enumerate(pieces)
    ]
    between: list[Message] = []
    for message in sorted(single, key=lambda m: (m.sent, m.tag, m.members)):
        if between and (joined := _join(between[-1], message)) is not None:
            between[-1] = joined
        else:
            between.append(message)
    return Messages(tuple(between), tuple(zip(moved.sends[me], moved.receives[me], strict=True)))


def _join(first: Message, second: Message) -> Message | None:
    """None if they are no neighbours in the heads of the same rows, or not of equal size."""
    a, b = first.piece, second.piece
    if (first.sent, first.tag) != (second.sent, second.tag) or a.heads is None or b.heads is None:
        return None
    same_rows = (a.buffer, a.start, a.stop) == (b.buffer, b.start, b.stop)
    num_heads = b.heads[1] - b.heads[0]
    equal = a.heads[1] - a.heads[0] == len(first.members) * num_heads
    if not (same_rows and equal and a.heads[1] == b.heads[0]):
        return None
    piece = replace(a, heads=(a.heads[0], b.heads[1]))
    return Message(piece, (*first.members, *second.members), first.tag, first.sent)
