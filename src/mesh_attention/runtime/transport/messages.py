"""Communications on their tensors, ready to begin: collectives of one stretch, and exchanges.

`begin` adds the works under way, and the copies that must follow them. Copies and landing places
are made only where the library cannot read or write a tensor as it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.runtime.collectives import all_gather, reduce_scatter

__all__ = ["Exchange", "Gather", "Message", "Reduce"]

Works = list[Any]
Copies = list[Callable[[], object]]


class Gather:
    """One stretch of an all-gather; `order[member]` is the member's place in the group."""

    def __init__(
        self, part: Tensor, rows: Tensor, group: dist.ProcessGroup, order: list[int]
    ) -> None:
        self._part, self._rows, self._group, self._order = part, rows, group, order
        self._usable = order == sorted(order) and rows.is_contiguous()

    def begin(self, works: Works, finish: Copies) -> None:
        own = self._part.contiguous()  # a slice of rows is contiguous; of heads it is not
        if self._usable:
            works.append(all_gather(self._rows, own, self._group))
            return
        landing = torch.empty_like(self._rows, memory_format=torch.contiguous_format)
        works.append(all_gather(landing, own, self._group))
        finish.append(lambda: self._unpermute(landing))

    def _unpermute(self, landing: Tensor) -> None:
        size = len(self._rows) // len(self._order)
        for member, place in enumerate(self._order):
            source = landing[place * size : (place + 1) * size]
            self._rows[member * size : (member + 1) * size].copy_(source)


class Reduce:
    """One stretch of a reduce-scatter."""

    def __init__(
        self, part: Tensor, rows: Tensor, group: dist.ProcessGroup, order: list[int]
    ) -> None:
        self._part, self._rows, self._group, self._order = part, rows, group, order
        self._usable = order == sorted(order) and rows.is_contiguous()

    def begin(self, works: Works, finish: Copies) -> None:
        part, own = self._part, self._part.contiguous()
        given = self._rows if self._usable else self._permuted()
        works.append(reduce_scatter(own, given, self._group))
        if own is not part and own.data_ptr() != part.data_ptr():
            finish.append(lambda: part.copy_(own))

    def _permuted(self) -> Tensor:
        """In the order of the process group, where the plan's order of members differs."""
        rows = self._rows
        size = len(rows) // len(self._order)
        result = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for member, place in enumerate(self._order):
            result[place * size : (place + 1) * size] = rows[member * size : (member + 1) * size]
        return result


class Message:
    """A tensor to or from another rank; both sides number what is between them alike."""

    def __init__(self, tensor: Tensor, peer: int, tag: int, *, sent: bool) -> None:
        self.tensor, self.peer, self.tag, self.sent = tensor, peer, tag, sent


class Exchange:
    """Messages that go together, and what a rank gives to itself."""

    def __init__(
        self,
        messages: Sequence[Message],
        own: Sequence[tuple[Tensor, Tensor]],
        parent: dist.ProcessGroup,
        *,
        host_driven: bool,
    ) -> None:
        self._messages = messages
        self._own = own  # (source, target)
        self._parent = parent
        # gloo's point-to-point reads host memory only; its collectives take CUDA tensors.
        self._on_host = host_driven
        self._ready: list[dist.P2POp] | None = None
        if all(self._as_it_lies(message.tensor) for message in messages):
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
        for message in self._messages:
            if message.sent:
                tensor = self._sendable(message.tensor)
            else:
                tensor = self._landing(message.tensor, finish)
            call = dist.isend if message.sent else dist.irecv
            operations.append(dist.P2POp(call, tensor, message.peer, self._parent, message.tag))
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
