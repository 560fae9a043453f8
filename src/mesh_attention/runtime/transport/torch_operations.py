"""Calls of torch.distributed on their tensors, ready to begin.

`DistributedTransport` and the measurements of links make them. `begin` adds the works that are then
in flight, and the copies that must follow them. Copies and landing places are made only where the
library cannot read or write a tensor as it lies.

The messages of an exchange are found once for an operation, and given tensors in every call. In an
exchange of heads, the pieces for several members follow each other in the same rows. One piece
holds them all then, and one copy packs or unpacks it: launches cost more than such copies.
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


class Exchange:
    """Tensors that travel together, and `own` ones, (source, target), that a rank keeps."""

    def __init__(
        self,
        tensors: Sequence[PointToPoint],
        own: Sequence[tuple[Tensor, Tensor]],
        group: dist.ProcessGroup,
        *,
        host_driven: bool,
    ) -> None:
        # Receives first: gloo sends once it hears that the other side receives, and would hear it
        # behind all that the other side sends itself. NCCL goes by the order between two ranks.
        self._tensors = sorted(tensors, key=lambda message: (message.sent, message.tag))
        self._own = own
        self._group = group
        # gloo's point-to-point reads host memory only; its collectives take CUDA tensors.
        self._usable = [
            x.is_contiguous() and not (host_driven and x.is_cuda) for x, *_ in self._tensors
        ]
        self._device = "cpu" if host_driven else None  # of copies
        self._ready = self._operations([]) if all(self._usable) else None

    def begin(self, works: Works, finish: Copies) -> None:
        operations = self._operations(finish) if self._ready is None else self._ready
        if operations:
            works += dist.batch_isend_irecv(operations)
        for source, target in self._own:
            target.copy_(source)

    def _operations(self, finish: Copies) -> list[dist.P2POp]:
        operations: list[dist.P2POp] = []
        for message, usable in zip(self._tensors, self._usable, strict=True):
            x = message.tensor
            if not usable:
                x = torch.empty(x.shape, dtype=x.dtype, device=self._device or x.device)
                if message.sent:
                    x.copy_(message.tensor)
                else:
                    finish.append(partial(message.tensor.copy_, x))
            call, peers = dist.isend if message.sent else dist.irecv, message.peers
            for part, peer in zip((x,) if len(peers) == 1 else x, peers, strict=True):
                operations.append(dist.P2POp(call, part, peer, self._group, message.tag))
        return operations


class _Collective:
    """`rows` holds equal rows for each member; `order[member]` is the member's place in the group.
    They can be used as they lie if that is the order of the process group."""

    def __init__(
        self, part: Tensor, rows: Tensor, group: dist.ProcessGroup, order: Sequence[int]
    ) -> None:
        self._part, self._rows, self._group, self._order = part, rows, group, order
        self._usable = list(order) == sorted(order) and rows.is_contiguous()

    def _by_member(self, in_order_of_group: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of each member, and those of a tensor in the order of the process group."""
        places = in_order_of_group.tensor_split(len(self._order))
        rows = self._rows.tensor_split(len(self._order))
        return zip(rows, [places[place] for place in self._order], strict=True)


class Gather(_Collective):
    """One stretch of an all-gather."""

    def begin(self, works: Works, finish: Copies) -> None:
        own = self._part.contiguous()  # a slice of rows is contiguous; of heads it is not
        if self._usable:
            works.append(all_gather(self._rows, own, self._group))
            return
        landing = torch.empty_like(self._rows, memory_format=torch.contiguous_format)
        works.append(all_gather(landing, own, self._group))
        finish += [partial(rows.copy_, landed) for rows, landed in self._by_member(landing)]


class Reduce(_Collective):
    """One stretch of a reduce-scatter."""

    def begin(self, works: Works, finish: Copies) -> None:
        part, own, whole = self._part, self._part.contiguous(), self._rows
        if not self._usable:
            whole = torch.empty_like(whole, memory_format=torch.contiguous_format)
            for rows, place in self._by_member(whole):
                place.copy_(rows)
        works.append(reduce_scatter(own, whole, self._group))
        if own is not part and own.data_ptr() != part.data_ptr():
            finish.append(partial(part.copy_, own))


class ReduceByMessages(_Collective):
    """One stretch of a reduce-scatter over gloo: each member sends the others their rows and adds
    up what it gets, wide. gloo's own in PyTorch is an all-reduce, with twice the bytes."""

    def begin(self, works: Works, finish: Copies) -> None:
        part, group, me = self._part, self._group, dist.get_rank(self._group)
        landing = torch.empty((len(self._order), *part.shape), dtype=part.dtype, device="cpu")
        own: list[tuple[Tensor, Tensor]] = []
        tensors: list[PointToPoint] = []
        members = self._rows.tensor_split(len(self._order))
        for place, rows, target in zip(self._order, members, landing, strict=True):
            if place == me:
                own.append((rows, target))
                continue
            peer = dist.get_global_rank(group, place)
            tensors += [
                PointToPoint(target, (peer,), 0, False),
                PointToPoint(rows, (peer,), 0, True),
            ]
        Exchange(tensors, own, group, host_driven=True).begin(works, finish)
        wide = torch.promote_types(part.dtype, torch.float32)
        finish.append(lambda: part.copy_(landing.sum(0, dtype=wide)))


def gathers_by_messages(size: int, *, host_driven: bool) -> bool:
    """Whether an all-gather of so many ranks is an exchange. gloo's own (`host_driven`) sends
    before it says that it receives: the two directions of two ranks would take turns."""
    return host_driven and size == 2


def reduce_kind(*, host_driven: bool) -> type[Reduce | ReduceByMessages]:
    return ReduceByMessages if host_driven else Reduce


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
        for sent, by_member in ((True, moved.sends), (False, moved.receives))
        for member, pieces in enumerate(by_member)
        if member != me
        for tag, piece in enumerate(pieces)
    ]
    own = zip(moved.sends[me], moved.receives[me], strict=True)
    return Messages(tuple(_joined(single)), tuple(own))


def _joined(single: list[Message]) -> Iterator[Message]:
    single.sort(key=lambda message: (message.sent, message.tag, message.members))
    last = single[0] if single else None
    for message in single[1:]:
        assert last is not None
        joined = _join(last, message)
        if joined is None:
            yield last
        last = joined or message
    if last is not None:
        yield last


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
