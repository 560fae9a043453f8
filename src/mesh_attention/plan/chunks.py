"""Chunks of partitions, and where a member's rows lie in gathered and in stacked buffers.

A chunk is the same stretch of slots on every rank. A *whole* is a chunk of several members as a
gather lays it out; a *stack* holds several members' versions of one chunk one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.layout import Layout, Spans, joined

__all__ = ["Chunk", "chunks_of", "in_stack", "in_whole", "stack_spans", "whole_spans"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots `start..stop`; `cuts` (counted from start) keep the halves of a zigzag apart."""

    index: int
    start: int
    stop: int
    cuts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def local(self, buffer: str) -> Piece:
        """This chunk of a buffer that holds a rank's whole partition."""
        return Piece(buffer, self.start, self.stop)

    def local_stretches(self, buffer: str) -> tuple[Piece, ...]:
        return tuple(Piece(buffer, self.start + a, self.start + b) for a, b in pairwise(self.cuts))


def chunks_of(layout: Layout, count: int) -> tuple[Chunk, ...]:
    """`count` chunks of nearly equal size; never more than there are slots."""
    count = min(count, layout.slots)
    bounds = [i * layout.slots // count for i in range(count + 1)]
    return tuple(
        Chunk(
            i,
            start,
            stop,
            (0, *(h - start for h in layout.halves if start < h < stop), stop - start),
        )
        for i, (start, stop) in enumerate(pairwise(bounds))
    )


def whole_spans(partitions: Sequence[int], chunk: Chunk, slots: int) -> Spans:
    return joined(
        (p * slots + chunk.start + a, p * slots + chunk.start + b)
        for a, b in pairwise(chunk.cuts)
        for p in partitions
    )


def stack_spans(partition: int, copies: int, chunk: Chunk, slots: int) -> Spans:
    own = (partition * slots + chunk.start, partition * slots + chunk.stop)
    return (own,) * copies


def in_whole(buffer: str, member: int, num_members: int, chunk: Chunk) -> tuple[Piece, ...]:
    """The rows of one member in a whole."""
    pieces = []
    for a, b in pairwise(chunk.cuts):
        first = num_members * a + member * (b - a)
        pieces.append(Piece(buffer, first, first + b - a))
    return tuple(pieces)


def in_stack(buffer: str, copy: int, chunk: Chunk) -> tuple[Piece, ...]:
    base = copy * chunk.size
    return tuple(Piece(buffer, base + a, base + b) for a, b in pairwise(chunk.cuts))
