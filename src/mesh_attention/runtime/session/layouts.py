"""Tensors cut and joined by a layout, and the layouts in which tensors are known to lie."""

from __future__ import annotations

from functools import lru_cache
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.plan.problem.layout import Layout


def take_shard(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """The slots of one rank along `dim`; padding slots are zero."""
    positions = torch.from_numpy(layout.positions(rank)).to(whole.device)
    padding = positions >= layout.num_tokens
    shard = whole.index_select(dim, positions.clamp(max=layout.num_tokens - 1))
    if layout.padded_tokens == layout.num_tokens:
        return shard
    shape = [1] * whole.ndim
    shape[dim] = -1
    return shard.masked_fill(padding.view(shape), 0)


def join_shards(shards: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole tensor from the shards of all ranks in order, without padding."""
    joined = torch.cat(shards, dim=dim)
    places = torch.empty(layout.padded_tokens, dtype=torch.int64, device="cpu")
    for rank in range(layout.num_ranks):
        first = rank * layout.slots
        positions = torch.from_numpy(layout.positions(rank))
        places[positions] = torch.arange(first, first + layout.slots, device="cpu")
    return joined.index_select(dim, places[: layout.num_tokens].to(joined.device))


class KnownLayouts:
    """The layouts of tensors that were cut here or that attention returned, as long as they live
    and nothing is written to them. What is computed from them is not known, but views are."""

    def __init__(self) -> None:
        # By the number of the object; Tensor has another meaning of ==.
        self._of: dict[int, tuple[ref[Tensor], Layout, int]] = {}

    def keep(self, x: Tensor, layout: Layout) -> None:
        if not x.is_inference():  # whose writes are not counted
            number, of = id(x), self._of
            of[number] = ref(x, lambda _: of.pop(number, None)), layout, x._version

    def of(self, x: Tensor) -> Layout | None:
        for tensor in (x, x._base):
            known = self._of.get(id(tensor))
            if known is not None and known[0]() is tensor and known[2] == x._version:
                return known[1]  # a view has the version of its base
        return None


KNOWN_LAYOUTS = KnownLayouts()


@lru_cache(64)
def same_rows(cut: Layout, layout: Layout) -> bool:
    """Whether all ranks have all tokens of `layout` in the same slots in layout `cut`."""
    if cut == layout or (cut.slots, cut.num_ranks) != (layout.slots, layout.num_ranks):
        return cut == layout
    for rank in range(layout.num_ranks):
        positions = layout.positions(rank)
        real = positions < layout.num_tokens
        if not np.array_equal(cut.positions(rank)[real], positions[real]):
            return False
    return True


def in_documents(
    positions: NDArray[np.int64], starts: tuple[int, ...], num_tokens: int
) -> NDArray[np.int64]:
    """These positions, counted from the start of their documents; padding is at 0."""
    begun = np.array(starts, dtype=np.int64)[document_of(positions, starts)]
    return np.where(positions < num_tokens, positions - begun, 0)


def document_of(positions: NDArray[np.int64], starts: tuple[int, ...]) -> NDArray[np.int64]:
    """Of documents that begin at the same token the last one has it."""
    return np.searchsorted(starts[:-1], positions, side="right") - 1
