"""Tensors cut and joined by a layout, and what is remembered of them: in which layout a tensor is
known to lie, and what a thread has cut, which calls are held against (`port_checks.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from threading import local
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.caches import LruCache

_NUM_CUT = 64  # layouts, of each kind


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


# The layout; the ranks of the group; the stride of the dimension that was cut, which views keep.
Known = tuple[Layout, tuple[int, ...], int]


class KnownLayouts:
    """The layouts of tensors that were cut here or that attention returned, as long as they live
    and nothing is written to them. What is computed from them is not known, but views are."""

    def __init__(self) -> None:
        # By the number of the object; Tensor has another meaning of ==.
        self._of: dict[int, tuple[ref[Tensor], int, Known]] = {}

    def keep(self, x: Tensor, layout: Layout, ranks: tuple[int, ...], dim: int) -> None:
        """`x` lies in `layout` along `dim`, over these ranks."""
        if not x.is_inference():  # whose writes are not counted
            number, of, known = id(x), self._of, (layout, ranks, x.stride(dim))
            of[number] = ref(x, lambda _: of.pop(number, None)), x._version, known

    def of(self, x: Tensor) -> Known | None:
        for tensor in (x, x._base):
            kept = self._of.get(id(tensor))
            if kept is not None and kept[0]() is tensor and kept[1] == x._version:
                return kept[2]  # a view has the version of its base
        return None


KNOWN_LAYOUTS = KnownLayouts()


@dataclass(frozen=True)
class Cut:
    """What was cut. `layout`: None where it has several documents; `of_batch`: a batch said its
    length; `by`: the name of the object."""

    layout: Layout | None
    of_batch: bool
    by: str


@dataclass(frozen=True, eq=False)
class Cuts:
    """Equal ones are one object, which costs a key nothing."""

    all: tuple[Cut, ...]

    @property
    def plain(self) -> dict[Layout, bool]:
        """Layouts of one document, and whether a batch said its length."""
        return {cut.layout: cut.of_batch for cut in self.all if cut.layout is not None}

    @property
    def is_packed(self) -> bool:
        return not self.plain


class Shardings(local):
    """What a thread has cut on a process group: calls without documents are held against it. Other
    threads, as those of loaders, may be batches ahead.

    What an object cut before the latest call is forgotten when it cuts as many slots in another
    way: whoever means both takes two objects, or gives documents. Batches that said their length
    are forgotten as soon as any object cuts by documents.

    of       what calls may be made on, by the slots of a rank, and by object and slots
    packed   the latest layout of several documents, by object and slots
    latest   tokens of what was cut last
    """

    def __init__(self) -> None:
        self.of: LruCache[int | tuple[str, int], Cuts] = LruCache(2 * _NUM_CUT)
        self.packed: LruCache[tuple[str, int], Layout] = LruCache(_NUM_CUT)
        self.latest = 0
        self._same: LruCache[tuple[Cut, ...], Cuts] = LruCache(_NUM_CUT)
        self._since_call: LruCache[tuple[int, Cut], None] = LruCache(_NUM_CUT)
        self._num_calls = 0

    def keep(self, layout: Layout, cut: Cut, num_calls: int) -> None:
        """`num_calls`: how many have begun on the process group."""
        if num_calls != self._num_calls:
            self._since_call.clear()
            self._num_calls = num_calls
        slots, self.latest = layout.slots, layout.num_tokens
        before = self.of[slots].all if slots in self.of else ()
        now = (*[x for x in before if x != cut and self._stays(slots, x, cut)], cut)[-_NUM_CUT:]
        self._since_call.keep((slots, cut), None)
        if cut.layout is None:
            self.packed.keep((cut.by, slots), layout)
        self._put(slots, now)
        for by in {x.by for x in (*before, cut)}:
            self._put((by, slots), tuple(x for x in now if x.by == by))

    def of_slots(self, by: str, slots: int) -> Cuts | None:
        """Where an object has cut nothing of so many slots, what others have cut."""
        return self.of.get((by, slots)) or self.of.get(slots)

    def _stays(self, slots: int, old: Cut, new: Cut) -> bool:
        is_new, by_another = (slots, old) in self._since_call, old.by != new.by
        if old.layout is None:
            return is_new and by_another
        if new.layout is None and old.of_batch:
            return False
        return is_new or by_another

    def _put(self, place: int | tuple[str, int], cuts: tuple[Cut, ...]) -> None:
        if cuts:
            self.of.keep(place, self._same.find(cuts) or self._same.keep(cuts, Cuts(cuts)))
        else:
            self.of.pop(place, None)


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
