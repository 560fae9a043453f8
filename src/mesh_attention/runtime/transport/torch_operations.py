"""Communications of torch.distributed on their tensors, ready to begin.

`begin` adds the works that are then in flight, and the copies that must follow them. Copies and
landing places are made only where the library cannot read or write a tensor as it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Works = list[Any]
Copies = list[Callable[[], object]]


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Asynchronous; returns the work. torch 2.13 renames it and warns on the old name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=group, async_op=True)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)


class _Collective:
    """`rows` holds equal rows for each member; `order[member]` is the member's place in the group.
    They can be used as they lie if that is the order of the process group."""

    def __init__(
        self, part: Tensor, rows: Tensor, group: dist.ProcessGroup, order: list[int]
    ) -> None:
        self._part, self._rows, self._group = part, rows, group
        self._usable = order == sorted(order) and rows.is_contiguous()
        size = len(rows) // len(order)
        self._places = [(m * size, place * size, size) for m, place in enumerate(order)]


class Gather(_Collective):
    """One stretch of an all-gather."""

    def begin(self, works: Works, finish: Copies) -> None:
        own = self._part.contiguous()  # a slice of rows is contiguous; of heads it is not
        if self._usable:
            works.append(all_gather(self._rows, own, self._group))
            return
        landing = torch.empty_like(self._rows, memory_format=torch.contiguous_format)
        works.append(all_gather(landing, own, self._group))
        finish.append(lambda: self._in_order_of_members(landing))

    def _in_order_of_members(self, landing: Tensor) -> None:
        for at, place, size in self._places:
            self._rows[at : at + size].copy_(landing[place : place + size])


class Reduce(_Collective):
    """One stretch of a reduce-scatter."""

    def begin(self, works: Works, finish: Copies) -> None:
        part, own = self._part, self._part.contiguous()
        given = self._rows if self._usable else self._in_order_of_group()
        works.append(reduce_scatter(own, given, self._group))
        if own is not part and own.data_ptr() != part.data_ptr():
            finish.append(lambda: part.copy_(own))

    def _in_order_of_group(self) -> Tensor:
        result = torch.empty_like(self._rows, memory_format=torch.contiguous_format)
        for at, place, size in self._places:
            result[place : place + size] = self._rows[at : at + size]
        return result


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """A tensor to or from another rank; both sides number what is between them alike."""

    tensor: Tensor
    peer: int
    tag: int
    sent: bool


class Exchange:
    """Tensors that travel together, and those that a rank keeps."""

    def __init__(
        self,
        tensors: Sequence[PointToPoint],
        own: Sequence[tuple[Tensor, Tensor]],
        parent: dist.ProcessGroup,
        *,
        host_driven: bool,
    ) -> None:
        # Receives first: gloo sends once it hears that the other side receives, and would hear it
        # behind all that the other side sends itself.
        self._tensors = sorted(tensors, key=lambda one: one.sent)
        self._own = own  # (source, target)
        self._parent = parent
        # gloo's point-to-point reads host memory only; its collectives take CUDA tensors.
        self._on_host = host_driven
        self._ready: list[dist.P2POp] | None = None
        if all(self._as_it_lies(one.tensor) for one in tensors):
            self._ready = self._operations([])

    def begin(self, works: Works, finish: Copies) -> None:
        operations = self._operations(finish) if self._ready is None else self._ready
        if operations:
            works += dist.batch_isend_irecv(operations)
        for source, target in self._own:
            target.copy_(source)

    def _as_it_lies(self, x: Tensor) -> bool:
        return x.is_contiguous() and (not self._on_host or x.device.type == "cpu")

    def _operations(self, finish: Copies) -> list[dist.P2POp]:
        operations = []
        for one in self._tensors:
            x, call = one.tensor, dist.isend if one.sent else dist.irecv
            tensor = self._sendable(x) if one.sent else self._landing(x, finish)
            operations.append(dist.P2POp(call, tensor, one.peer, self._parent, one.tag))
        return operations

    def _sendable(self, x: Tensor) -> Tensor:
        return x.cpu().contiguous() if self._on_host else x.contiguous()

    def _landing(self, target: Tensor, finish: Copies) -> Tensor:
        if self._as_it_lies(target):
            return target
        device = "cpu" if self._on_host else target.device
        landing = torch.empty(target.shape, dtype=target.dtype, device=device)
        finish.append(lambda: target.copy_(landing))
        return landing


class GatherByMessages(_Collective):
    """One stretch of an all-gather of two ranks over gloo, whose own sends before it says that it
    receives: the two directions would take turns."""

    def begin(self, works: Works, finish: Copies) -> None:
        me = dist.get_rank(self._group)
        tensors = []
        for at, place, size in self._places:
            target = self._rows[at : at + size]
            if place == me * size:
                target.copy_(self._part)
                continue
            peer = dist.get_global_rank(self._group, place // size)
            tensors.append(PointToPoint(target, peer, 0, sent=False))
            tensors.append(PointToPoint(self._part, peer, 0, sent=True))
        Exchange(tensors, (), self._group, host_driven=True).begin(works, finish)


class ReduceByMessages(_Collective):
    """One stretch of a reduce-scatter over gloo: each member sends the others their rows and adds
    up what it gets, wide. gloo's own in PyTorch is an all-reduce, with twice the bytes."""

    def begin(self, works: Works, finish: Copies) -> None:
        rows, part, group = self._rows, self._part, self._group
        me = dist.get_rank(group)
        shape = (len(self._places), *part.shape)
        landing = torch.empty(shape, dtype=part.dtype, device="cpu")
        tensors = []
        for (at, place, size), target in zip(self._places, landing, strict=True):
            mine = rows[at : at + size]
            if place == me * size:
                target.copy_(mine)
                continue
            peer = dist.get_global_rank(group, place // size)
            tensors.append(PointToPoint(target, peer, 0, sent=False))
            tensors.append(PointToPoint(mine, peer, 0, sent=True))
        Exchange(tensors, (), group, host_driven=True).begin(works, finish)
        wide = torch.promote_types(part.dtype, torch.float32)
        finish.append(lambda: part.copy_(landing.sum(0, dtype=wide)))


Stretch = Gather | Reduce | GatherByMessages | ReduceByMessages


def gather_kind(size: int, *, host_driven: bool) -> type[Stretch]:
    """How so many ranks gather; `host_driven`: over gloo."""
    return GatherByMessages if host_driven and size == 2 else Gather


def reduce_kind(*, host_driven: bool) -> type[Stretch]:
    return ReduceByMessages if host_driven else Reduce
