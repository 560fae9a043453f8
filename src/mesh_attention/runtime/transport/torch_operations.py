"""Collectives of torch.distributed on their tensors, ready to begin.

`DistributedTransport` and the measurements of links make them. Beginning one adds the works that
are then in flight, and the copies that must follow them. Copies and landing places are made only
where the library cannot read or write a tensor as it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.runtime.transport.exchange import Copies, Messages, Works, exchange


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Asynchronous; returns the work. torch 2.13 renames it and warns on the old name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=group, async_op=True)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, async_op=True)


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
    ranks = tuple([dist.get_global_rank(group, place) for place in order])
    landing = torch.empty((len(order), *part.shape), dtype=part.dtype, device="cpu")
    rows = whole.view(landing.shape)
    messages = (Messages(landing, ranks, 0, False), Messages(rows, ranks, 0, True))
    exchange(messages, group, host_driven=True)(works, finish)
    wide = torch.promote_types(part.dtype, torch.float32)
    finish.append(lambda: part.copy_(landing.sum(0, dtype=wide)))


def gathers_by_messages(size: int, *, host_driven: bool) -> bool:
    """Whether an all-gather of so many ranks is an exchange. gloo's own (`host_driven`) sends
    before it says that it receives: the two directions of two ranks would take turns."""
    return host_driven and size == 2
