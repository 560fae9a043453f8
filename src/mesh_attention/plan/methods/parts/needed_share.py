"""One rank's share of one side: what it receives, gives away, and merges, by rows of its buffers.

A rank that works on rows of others gathers all that it works on, in order of position, its own rows
among it. One that works on its own only takes them where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.methods.parts.needed_rows import Rows, SeenRows
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.spans import Spans, joined

Stretch = tuple[int, int]
Stretches = tuple[Stretch, ...]
ByRank = dict[int, Stretches]  # what is exchanged with each rank


@dataclass(frozen=True, slots=True)
class Summand:
    """Partial results of own rows `start..stop`: they begin at a row of the own partials, or of
    the stack of those that arrive."""

    start: int
    stop: int
    row: int
    arrives: bool


@dataclass(frozen=True, slots=True)
class SeenShare:
    rank: int
    local: bool  # works on its own rows only
    rows: Spans  # the places of what it works on; none if there is nothing to do
    num_rows: int
    gathered: ByRank  # rows of them, by owner
    given: ByRank  # own slots, by user
    stacked: ByRank  # rows of the stack in which partials of own rows arrive, by user
    stack: Spans  # the places of that stack
    sums: list[tuple[Stretch, list[Summand]]]  # own slots, in stretches with the same partials


def share_of(seen: SeenRows, layout: Layout, rank: int) -> SeenShare:
    received, given = seen.received(rank), seen.given(rank)
    local = not (received.ranks != rank).any()
    own = rank * layout.slots
    others = _only(given, given.ranks != rank)
    arriving = _rows(others)
    summands = [
        Summand(slot, slot + size, row, True)
        for slot, size, (row, _) in zip(
            others.slots.tolist(), others.sizes.tolist(), arriving, strict=True
        )
    ]
    if local:
        gathered: ByRank = {}
        rows: Spans = ((own, own + layout.slots),) if len(received.ranks) else ()
        mine = [Summand(0, layout.slots, 0, False)] if rows else []
        given = others
    else:
        lies = _rows(received)
        gathered = _by_rank(received, lies)
        places = (received.ranks * layout.slots + received.slots).tolist()
        rows = joined(
            (place, place + size)
            for place, size in zip(places, received.sizes.tolist(), strict=True)
        )
        which = zip(received.ranks.tolist(), received.slots.tolist(), lies, strict=True)
        mine = [
            Summand(slot, slot + stop - start, start, False)
            for owner, slot, (start, stop) in which
            if owner == rank
        ]
    slots = list(zip(given.slots.tolist(), (given.slots + given.sizes).tolist(), strict=True))
    return SeenShare(
        *(rank, local, rows, sum(stop - start for start, stop in rows), gathered),
        given=_by_rank(given, slots),
        stacked=_by_rank(others, arriving),
        stack=joined((own + one.start, own + one.stop) for one in summands),
        sums=_sums([*mine, *summands], layout.slots),
    )


def _sums(summands: list[Summand], slots: int) -> list[tuple[Stretch, list[Summand]]]:
    """Where nobody works on a stretch there are none."""
    cuts = sorted({0, slots}.union(*((one.start, one.stop) for one in summands)))
    at = {cut: i for i, cut in enumerate(cuts)}
    found: list[list[Summand]] = [[] for _ in cuts[1:]]
    for one in summands:
        for stretch in range(at[one.start], at[one.stop]):
            found[stretch].append(one)
    return list(zip(pairwise(cuts), found, strict=True))


def _only(rows: Rows, which: NDArray[np.bool_]) -> Rows:
    return Rows(rows.ranks[which], rows.slots[which], rows.sizes[which])


def _rows(rows: Rows) -> list[Stretch]:
    """Where they lie in a buffer that holds them one after the other."""
    ends = np.cumsum(rows.sizes)
    return list(zip((ends - rows.sizes).tolist(), ends.tolist(), strict=True))


def _by_rank(rows: Rows, stretches: Sequence[Stretch]) -> ByRank:
    found: dict[int, list[Stretch]] = {}
    for rank, stretch in zip(rows.ranks.tolist(), stretches, strict=True):
        found.setdefault(rank, []).append(stretch)
    return {rank: tuple(own) for rank, own in found.items()}
