"""Which rank owns which token: contiguous, zigzag, striped or listed (algorithm.md, section 7).

A layout is exact for any number of tokens. The sequence is padded at its end to a length that
divides evenly, and every rank owns the same number of *slots*; a slot whose position lies past the
last token is padding, and is known as padding everywhere because no mask shows it anything.

    contiguous   rank g owns block g of n
    zigzag       rank g owns blocks g and 2n-1-g of 2n (low and high half)
    striped      blocks of `block` tokens are dealt out in turn; block = 1 deals single tokens
    listed       rank g owns the stretches of positions that are listed for it, in that order

Listed ranks may own different numbers of tokens: all have the slots of the largest.

What a rank owns is its *partition*. A method may number ranks in another order than their process
group does, so that neighbours in its grid share a node. `order` then says which partition each of
its ranks owns: tokens lie where they do without it.

A *place* numbers all slots of all ranks: `place = rank * slots + slot`. Buffers name their rows by
places, so every piece of a partition is one interval whatever the layout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.problem.runs import Run, clip_run
from mesh_attention.plan.problem.spans import Spans, cut, joined

_MANY_SPANS = 16  # fewer are looked at faster one by one
MAX_STRIPE = 1 << 30  # more tokens than any sequence has; places of longer ones overflow
Stretches = tuple[tuple[tuple[int, int], ...], ...]  # intervals of positions, of each rank


class LayoutKind(StrEnum):
    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"
    LISTED = "listed"


def read_stretches(value: Any) -> Stretches:
    """Stretches as nested tuples; `Layout` checks whether they fit."""
    try:
        return tuple(
            tuple((number("stretches", a, least=0), number("stretches", b, least=0)) for a, b in of)
            for of in value
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            "stretches: give for each rank its (start, stop) positions, as in "
            "(((0, 2), (6, 8)), ((2, 6),))"
        ) from None


@dataclass(frozen=True)
class Layout:
    """
    >>> Layout(LayoutKind.ZIGZAG, num_tokens=8, num_ranks=2).tokens(0)
    [0, 1, 6, 7]
    >>> Layout(LayoutKind.STRIPED, num_tokens=5, num_ranks=2).tokens(1)
    [1, 3, None]
    >>> Layout(LayoutKind.CONTIGUOUS, num_tokens=6, num_ranks=3, order=(2, 0, 1)).tokens(0)
    [4, 5]
    >>> Layout(
    ...     LayoutKind.LISTED, num_tokens=5, num_ranks=2, stretches=(((0, 1), (3, 5)), ((1, 3),))
    ... ).tokens(1)
    [1, 2, None]
    """

    kind: LayoutKind
    num_tokens: int
    num_ranks: int
    block: int = 1
    stretches: Stretches | None = None
    order: tuple[int, ...] | None = None  # the partition of each rank; None: each its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", LayoutKind(self.kind))
        if self.num_tokens < 1 or self.num_ranks < 1:
            raise PlanError(
                f"a layout needs at least one token and one rank, "
                f"got {self.num_tokens} tokens on {self.num_ranks} ranks"
            )
        if not 1 <= self.block <= MAX_STRIPE:
            raise PlanError(
                f"stripe_block={self.block}: a stripe has at least one token, at most {MAX_STRIPE}"
            )
        if self.block > 1 and self.kind is not LayoutKind.STRIPED:
            raise PlanError(
                f"stripe_block={self.block} only applies to the striped layout, not {self.kind}"
            )
        if self.stretches is None:
            if self.kind is LayoutKind.LISTED:
                raise PlanError("layout=listed needs 'stretches', the positions of each rank")
        elif self.kind is not LayoutKind.LISTED:
            raise PlanError(f"'stretches' only apply to layout=listed, not {self.kind}")
        else:
            # Equal layouts compare equal, however their stretches were cut.
            object.__setattr__(self, "stretches", tuple(map(joined, self.stretches)))
            self._check_stretches()
        if self.order is not None:
            order, in_order = tuple(self.order), range(self.num_ranks)
            if sorted(order) != list(in_order):
                raise PlanError(f"order={order}: name each of the {self.num_ranks} partitions once")
            object.__setattr__(self, "order", None if order == tuple(in_order) else order)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, because layouts of many stretches are often looked up. Made of numbers
        only, so that it is the same in every process."""
        parts = self.stretches or (), self.order or ()
        return hash((self.num_tokens, self.num_ranks, self.block, *parts))

    def _check_stretches(self) -> None:
        assert self.stretches is not None
        if len(self.stretches) != self.num_ranks:
            raise PlanError(
                f"stretches of {len(self.stretches)} ranks were given for {self.num_ranks} ranks"
            )
        table = np.array([pair for of in self.stretches for pair in of], np.int64).reshape(-1, 2)
        starts, stops = table[np.argsort(table[:, 0], kind="stable")].T
        if (stops < starts).any():
            at = int(np.flatnonzero(stops < starts)[0])
            raise PlanError(f"stretches: {starts[at]}..{stops[at]} ends before it starts")
        # One after the other they must reach from the first token to the last.
        ends, begins = [0, *stops.tolist()], [*starts.tolist(), self.num_tokens]
        for end, begin in zip(ends, begins, strict=True):
            if end != begin:
                low, high = min(end, begin), max(end, begin)
                what = "are not listed" if end < begin else "are listed twice, or are no tokens"
                raise PlanError(
                    f"stretches: positions {low}..{high} {what}; each of the {self.num_tokens} "
                    "positions belongs to one rank"
                )

    def on_devices(self, devices: Sequence[int]) -> Layout:
        """The same tokens on the same devices, with ranks numbered in another way: rank r owns what
        rank `devices[r]` owns here."""
        return _on_devices(self, tuple(devices))

    def by_device(self, devices: Sequence[int]) -> Layout:
        """The inverse of `on_devices`: what each device owns, where rank r is `devices[r]`.

        >>> layout = Layout(LayoutKind.ZIGZAG, num_tokens=12, num_ranks=3)
        >>> layout.on_devices((2, 0, 1)).by_device((2, 0, 1)) == layout
        True
        """
        partitions = {device: self.partition(rank) for rank, device in enumerate(devices)}
        return replace(self, order=tuple([partitions[device] for device in range(len(devices))]))

    def partition(self, rank: int) -> int:
        return rank if self.order is None else self.order[rank]

    def to_json(self) -> dict[str, Any]:
        """The fields, without stretches and order where there are none."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}

    @property
    def _grain(self) -> int:
        """Tokens that are dealt out in one turn to all ranks."""
        return self.num_ranks * (2 if self.kind is LayoutKind.ZIGZAG else self.block)

    @cached_property
    def padded_tokens(self) -> int:
        if self.stretches is not None:
            return self.num_ranks * max(sum(b - a for a, b in own) for own in self.stretches)
        return -(-self.num_tokens // self._grain) * self._grain

    @cached_property
    def slots(self) -> int:
        """Slots of each rank, padding included."""
        return self.padded_tokens // self.num_ranks

    @cached_property
    def halves(self) -> tuple[int, ...]:
        """Slot boundaries that a gather keeps apart, so that each part is one run of positions."""
        if self.kind is LayoutKind.ZIGZAG:
            return (0, self.slots // 2, self.slots)
        return (0, self.slots)

    def _partitions(self) -> list[Spans]:
        """The positions of each partition in order, padding included; not of a striped layout."""
        size, last = self.halves[1], 2 * self.num_ranks - 1
        if self.kind is LayoutKind.CONTIGUOUS:
            return [((p * size, (p + 1) * size),) for p in range(self.num_ranks)]
        if self.kind is LayoutKind.ZIGZAG:
            low_and_high = [(p, last - p) for p in range(self.num_ranks)]
            return [tuple((x * size, (x + 1) * size) for x in both) for both in low_and_high]
        partitions, unused = [], self.num_tokens
        for own in self.stretches or ():
            padding = self.slots - sum(b - a for a, b in own)
            partitions.append((*own, (unused, unused + padding)) if padding else own)
            unused += padding
        return partitions

    @cached_property
    def _stretches(self) -> tuple[list[int], list[int]]:
        """Of all stretches of consecutive positions, rank by rank: the place at which each begins,
        with one past the last place, and its first position. Not of a striped layout."""
        partitions = self._partitions()
        owned = [s for rank in range(self.num_ranks) for s in partitions[self.partition(rank)]]
        return list(accumulate((b - a for a, b in owned), initial=0)), [a for a, _ in owned]

    @cached_property
    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The places of `_stretches` as an array, and from the places of each to its positions."""
        places, firsts = map(np.array, self._stretches)
        return places, firsts - places[:-1]

    def parts(self, rank: int) -> Spans:
        """Slots of a rank, cut so that the positions of each part are consecutive; a striped rank
        is one part nevertheless."""
        if self.kind is LayoutKind.STRIPED:
            return ((0, self.slots),)
        places, first = self._stretches[0], rank * self.slots
        own = places[bisect_left(places, first) : bisect_left(places, first + self.slots) + 1]
        return tuple(pairwise([place - first for place in own]))

    def runs(self, place_start: int, place_stop: int) -> list[Run]:
        """Positions of an interval of places, in order, padding included."""
        if self.kind is not LayoutKind.STRIPED:
            return [Run(a, b - a) for a, b in self._blocks(((place_start, place_stop),))]
        runs: list[Run] = []
        stride = self.num_ranks * self.block
        while place_start < place_stop:
            rank, slot = divmod(place_start, self.slots)
            stop = min(self.slots, slot + place_stop - place_start)
            start = self.partition(rank) * self.block
            first, last = (
                start + at // self.block * stride + at % self.block for at in (slot, stop - 1)
            )
            whole = Run(start, self.block, stride, self.slots // self.block)
            runs += clip_run(whole, first, last + 1)
            place_start += stop - slot
        return runs

    def edges_of(self, spans: Spans) -> NDArray[np.int64] | None:
        """The starts and the stops of the stretches of positions that lie at intervals of places,
        in order: faster than `runs`. None for a striped layout, which may have many."""
        if self.kind is LayoutKind.STRIPED:
            return None
        at_places = self.kind is LayoutKind.CONTIGUOUS and self.order is None
        if not at_places and len(spans) < _MANY_SPANS:
            return _edges(self._blocks(spans))
        return _edges(spans) if at_places else self._many_edges(spans)

    def _many_edges(self, spans: Spans) -> NDArray[np.int64]:
        (starts, stops), (places, shifts) = _edges(spans), self._shifts
        _, index, low, high = cut(starts, stops, places[:-1], places[1:])
        return np.stack([low, high]) + shifts[index]

    def _blocks(self, spans: Spans) -> list[tuple[int, int]]:
        """Their positions, cut where another rank or another stretch begins."""
        places, firsts = self._stretches
        if len(spans) >= _MANY_SPANS:
            return list(zip(*self._many_edges(spans).tolist(), strict=True))
        blocks = []
        for start, stop in spans:
            at = bisect_right(places, start) - 1
            while start < stop:
                end, shift = min(stop, places[at + 1]), firsts[at] - places[at]
                blocks.append((start + shift, end + shift))
                start, at = end, at + 1
        return blocks

    def all_runs(self) -> NDArray[np.int64]:
        """The runs of all ranks in order: start, block, stride and count of each."""
        if self.kind is LayoutKind.STRIPED:
            runs = self.runs(0, self.padded_tokens)
            return np.array([(r.start, r.block, r.stride, r.count) for r in runs], dtype=np.int64)
        places, firsts = self._stretches
        sizes = np.diff(places)
        return np.stack([np.array(firsts), sizes, 0 * sizes, 0 * sizes + 1], axis=1)

    def slot_runs(self, start: int, stop: int) -> list[Run]:
        """Positions of these slots of all ranks together, as a set."""
        ranks, runs = self.num_ranks, []
        if self.kind is LayoutKind.LISTED:
            firsts = range(0, self.padded_tokens, self.slots)
            return [run for first in firsts for run in self.runs(first + start, first + stop)]
        # Tokens are dealt out in turns of so many a rank, and in each turn lie side by side.
        turn = self.block if self.kind is LayoutKind.STRIPED else self.halves[1]
        while start < stop:
            whole, within = divmod(start, turn)
            if within or stop - start < turn:
                end = min(stop, (whole + 1) * turn)
                runs.append(Run(whole * ranks * turn + within, end - start, turn, ranks))
            else:
                end = stop - stop % turn
                runs.append(Run(start * ranks, (end - start) * ranks))
            start = end
        return runs

    def positions(self, rank: int) -> NDArray[np.int64]:
        """Position of every slot of a rank; padding positions are `>= num_tokens`."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank {rank} is outside 0..{self.num_ranks - 1}")
        return self.positions_of(((rank * self.slots, (rank + 1) * self.slots),))

    def positions_of(self, spans: Spans) -> NDArray[np.int64]:
        parts = [
            (r.start + np.arange(r.count)[:, None] * r.stride + np.arange(r.block)[None, :]).ravel()
            for start, stop in spans
            for r in self.runs(start, stop)
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)

    def tokens(self, rank: int) -> list[int | None]:
        """Positions of a rank's slots with None for padding; for reading, not for speed."""
        return [int(p) if p < self.num_tokens else None for p in self.positions(rank)]


def _edges(spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Starts and stops of intervals."""
    flat = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=2 * len(spans))
    return flat.reshape(-1, 2).T


@lru_cache(maxsize=32)  # plans of a search, and both passes, have the same
def _on_devices(layout: Layout, devices: tuple[int, ...]) -> Layout:
    order = devices if layout.order is None else tuple([layout.order[x] for x in devices])
    return replace(layout, order=order)
