"""Chunks of partitions, and where a member's rows lie in gathered and in stacked buffers.

A chunk is the same stretch of slots, and the same heads, on every rank. A *whole* is a chunk of
several members as a gather lays it out; a *stack* holds several members' versions of one chunk one
below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.problem.spans import Spans, joined, slice_spans


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots `start..stop`; `cuts` (counted from start) keep the halves of a zigzag apart.

    `heads` are counted inside a buffer that holds all of them; None = all. `apart`: a rank holds
    each chunk of its own rows in a buffer of its own.
    """

    index: int
    start: int
    stop: int
    cuts: tuple[int, ...]
    heads: tuple[int, int] | None = None
    apart: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    def name(self, buffer: str) -> str:
        """Of the buffer that has this chunk of a rank's own rows."""
        return f"{buffer}.{self.index}" if self.apart else buffer

    def local(self, buffer: str) -> Piece:
        """This chunk of a rank's own rows."""
        if self.apart:
            return Piece(self.name(buffer), 0, self.size)
        return Piece(buffer, self.start, self.stop, self.heads)

    def local_stretches(self, buffer: str) -> tuple[Piece, ...]:
        whole = self.local(buffer)
        return tuple(
            replace(whole, start=whole.start + a, stop=whole.start + b)
            for a, b in pairwise(self.cuts)
        )


def chunks_between(halves: tuple[int, ...], count: int) -> tuple[Chunk, ...]:
    """`count` chunks of nearly equal size of rows whose parts `halves` a gather keeps apart; never
    more than there are rows."""
    return tuple(
        Chunk(i, start, stop, (0, *(h - start for h in halves if start < h < stop), stop - start))
        for i, (start, stop) in enumerate(pairwise(_bounds(halves[-1], count)))
    )


def chunk_slots(
    halves: tuple[int, ...], count: int, *, even: bool = False, short_start: bool = False
) -> tuple[Spans, ...]:
    """The slots of each of so many chunks. Even ones have as much of both halves of a zigzag, from
    its two ends: then chunks have about as much work each under a causal mask, on every rank. There
    are fewer where a half has fewer slots. With a short start the first of several is cut at a
    quarter of it.

    >>> chunk_slots((0, 4, 8), 2), chunk_slots((0, 4, 8), 2, even=True)
    ((((0, 4),), ((4, 8),)), (((0, 2), (6, 8)), ((2, 4), (4, 6))))
    >>> chunk_slots((0, 4, 8), 2, short_start=True)
    (((0, 1),), ((1, 4),), ((4, 8),))
    """
    size = halves[-1]
    folded = even and len(halves) == 3
    bounds = _bounds(halves[1] if folded else size, count)
    if short_start and len(bounds) > 2 and bounds[1] >= _SHORT:
        bounds.insert(1, bounds[1] // _SHORT)
    if not folded:
        return tuple(((a, b),) for a, b in pairwise(bounds))
    return tuple(((a, b), (size - b, size - a)) for a, b in pairwise(bounds))


_SHORT = 4  # part of the first chunk that comes before the rest of it


def _bounds(size: int, count: int) -> list[int]:
    count = min(count, size)
    return [i * size // count for i in range(count + 1)]


def by_heads(rows: Sequence[Chunk], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """These chunks of rows for each slice of the heads, slice after slice.

    >>> [(c.index, c.heads) for c in by_heads([Chunk(0, 0, 8, (0, 8))], [2, 4])]
    [(0, (0, 2)), (1, (2, 6))]
    """
    if len(sizes) == 1:
        return tuple(rows)
    bounds = [0, *accumulate(sizes)]
    return tuple(
        replace(chunk, index=part * len(rows) + chunk.index, heads=heads)
        for part, heads in enumerate(pairwise(bounds))
        for chunk in rows
    )


def whole_rows(owners: Sequence[Spans], chunk: Chunk) -> Spans:
    """A chunk of several owners, each given by its rows, as a gather lays it out."""
    return joined(
        span
        for a, b in pairwise(chunk.cuts)
        for rows in owners
        for span in slice_spans(rows, chunk.start + a, chunk.start + b)
    )


def stack_rows(rows: Spans, copies: int, chunk: Chunk) -> Spans:
    return slice_spans(rows, chunk.start, chunk.stop) * copies


def in_whole(buffer: str, member: int, num_members: int, chunk: Chunk) -> tuple[Piece, ...]:
    """The rows of one member in a whole."""
    firsts = [(num_members * a + member * (b - a), b - a) for a, b in pairwise(chunk.cuts)]
    return tuple([Piece(buffer, first, first + size) for first, size in firsts])


def in_stack(buffer: str, copy: int, chunk: Chunk) -> tuple[Piece, ...]:
    base = copy * chunk.size
    return tuple([Piece(buffer, base + a, base + b) for a, b in pairwise(chunk.cuts)])
