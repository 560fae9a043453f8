"""Chunks of rows and slices of heads: how finely transfers and attentions are cut.

A chunk is the same range of slots, and the same heads, on every rank. A *whole* is a chunk of
several members as a gather lays it out; a *stack* holds several members' versions of one chunk, one
after the other.

Slices of the heads follow each other through gather, attention and reduction. The attention of a
slice hides the gather of the next slice and the reduction of the one before, so only the first
gather and the last reduction stay open. Those should be small and the rest large, since every slice
costs a few transfers: sizes grow from the first slice on, no faster than attention usually outlasts
the gather of as many heads, and fall again towards the last.

Used by all builders, and by searches that need the usual cut. Pure functions of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.spans import Spans, joined, slice_spans

HeadSlices = tuple[int, int]  # most KV heads of the first and last slice, and of any slice
_SHORT = 4  # the part of the first chunk that comes before the rest of it
_GROWTH = 1.6
_ROWS_PER_CHUNK = 4096  # fewer rows a side and kernels lose speed; more and less can overlap
_ROWS_AND_HEADS = 128 * 132 * 2  # two rounds of 128 queries for every multiprocessor of an H100


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots `start..stop`; `cuts` (counted from start) keep the halves of a zigzag apart.

    `heads` are counted inside a buffer that holds all of them; None means all. `apart`: a rank
    holds each chunk of its own rows in a separate buffer.
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
        """The name of the buffer that has this chunk of a rank's own rows."""
        return f"{buffer}.{self.index}" if self.apart else buffer

    def local(self, buffer: str) -> Piece:
        """This chunk of a rank's own rows."""
        if self.apart:
            return Piece(self.name(buffer), 0, self.size)
        return Piece(buffer, self.start, self.stop, self.heads)

    def local_parts(self, buffer: str) -> tuple[Piece, ...]:
        """The same, in parts that a gather keeps apart."""
        whole = self.local(buffer)
        return tuple(
            replace(whole, start=whole.start + a, stop=whole.start + b)
            for a, b in pairwise(self.cuts)
        )


def chunks_between(
    halves: tuple[int, ...], slots: Iterable[Sequence[tuple[int, int]]], *, apart: bool = False
) -> list[Chunk]:
    """Chunks of these slots, one after the other. A gather keeps the parts of the rows between
    `halves` apart."""
    chunks: list[Chunk] = []
    at = 0
    for index, spans in enumerate(slots):
        parts = [
            min(b, high) - max(a, low)
            for a, b in spans
            for low, high in pairwise(halves)
            if a < high and low < b
        ]
        cuts = tuple(accumulate(parts, initial=0))
        chunks.append(Chunk(index, at, at + cuts[-1], cuts, apart=apart))
        at += cuts[-1]
    return chunks


def chunk_slots(
    halves: tuple[int, ...], count: int, *, even: bool = False, short_start: bool = False
) -> tuple[Spans, ...]:
    """The slots of each of `count` chunks, or fewer where there are fewer slots.

    `even`: a chunk has equal parts of both halves of a zigzag, from its two ends, so that chunks
    have about the same work on every rank under a causal mask. `short_start`: the first of several
    chunks is cut at a quarter of it.

    >>> chunk_slots((0, 4, 8), 2), chunk_slots((0, 4, 8), 2, even=True)
    ((((0, 4),), ((4, 8),)), (((0, 2), (6, 8)), ((2, 4), (4, 6))))
    >>> chunk_slots((0, 4, 8), 2, short_start=True)
    (((0, 1),), ((1, 4),), ((4, 8),))
    """
    folded = even and len(halves) == 3
    size = halves[1] if folded else halves[-1]
    count = min(count, size)
    bounds = [i * size // count for i in range(count + 1)]
    if short_start and len(bounds) > 2 and bounds[1] >= _SHORT:
        bounds.insert(1, bounds[1] // _SHORT)
    if not folded:
        return tuple(((a, b),) for a, b in pairwise(bounds))
    end = halves[-1]
    return tuple(((a, b), (end - b, end - a)) for a, b in pairwise(bounds))


def by_heads(rows: Sequence[Chunk], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """These chunks of rows for each slice of the heads, slice after slice, in the same buffers.

    >>> slices = by_heads([Chunk(0, 0, 8, (0, 8))], [2, 4])
    >>> [(c.index, c.heads, c.name("k")) for c in slices]
    [(0, (0, 2), 'k'), (1, (2, 6), 'k')]
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
    """The rows of a chunk of several owners as a gather lays it out."""
    return joined(
        span
        for a, b in pairwise(chunk.cuts)
        for rows in owners
        for span in slice_spans(rows, chunk.start + a, chunk.start + b)
    )


def stack_rows(rows: Spans, copies: int, chunk: Chunk) -> Spans:
    return slice_spans(rows, chunk.start, chunk.stop) * copies


def in_whole(member: int, num_members: int, chunk: Chunk) -> Spans:
    """The rows of one member in a whole."""
    firsts = [(num_members * a + member * (b - a), b - a) for a, b in pairwise(chunk.cuts)]
    return tuple([(first, first + size) for first, size in firsts])


def in_stack(copy: int, chunk: Chunk) -> Spans:
    base = copy * chunk.size
    return tuple([(base + a, base + b) for a, b in pairwise(chunk.cuts)])


def slice_sizes(num_heads: int, first: int, most: int) -> tuple[int, ...]:
    """The sizes of the slices; near the largest they are even, and may be smaller than asked for.

    >>> slice_sizes(64, 2, 16), slice_sizes(64, 16, 16)
    ((2, 3, 5, 8, 10, 9, 9, 8, 5, 3, 2), (16, 16, 16, 16))
    """
    rising: list[int] = []
    size, middle = first, num_heads
    while size < most and (middle == 2 * size or middle >= 3 * size):
        rising.append(size)
        middle -= 2 * size
        size = max(size + 1, round(size * _GROWTH))
    count = -(-middle // min(size, most))
    level = [middle // count + (at < middle % count) for at in range(count)] if count else []
    return (*rising, *level, *reversed(rising))


def usual_heads(problem: Problem, degree: int = 1) -> HeadSlices | None:
    """About eight slices of the KV heads that a rank holds, with small ones at both ends."""
    held = max(1, problem.kv_heads // degree)
    if held == 1:
        return None
    most = max(1, held // 8)
    return max(1, most // 4), most


def sizes_for(
    problem: Problem, degree: int, heads: HeadSlices | None, name: str = "head_slices"
) -> tuple[int, ...]:
    """Sizes of the slices of the KV heads that one of `degree` ranks of a unit holds."""
    held = max(1, problem.kv_heads // degree)
    if heads is None:
        return (held,)
    first, most = heads
    if not 1 <= first <= most <= held:
        where = f"{held} KV heads" + (f" that a rank holds with ulysses={degree}" * (degree > 1))
        raise PlanError(
            f"{name}={first}x{most}: give the KV heads of the first slice and of the "
            f"largest, 1 <= first <= largest <= {where}"
        )
    return slice_sizes(held, first, most)


def suggested_cut(
    problem: Problem, num_ranks: int, tile: tuple[int, int], degree: int
) -> tuple[tuple[int, int], HeadSlices | None]:
    """The usual chunks and slices. A rank with several KV heads cuts slices of heads that fill a
    GPU. With one KV head it cuts up to 4x4 chunks, 2x2 where ranks exchange tokens for heads, as
    long as every chunk keeps enough rows for a kernel."""
    q_rows, kv_rows = (
        side * degree * tokens // num_ranks
        for side, tokens in zip(tile, (problem.q_tokens, problem.keys), strict=True)
    )
    if num_ranks == 1:
        return (1, 1), None  # nothing travels
    heads = usual_heads(problem, degree)
    if heads is None:
        kq, kkv = (min(4, max(1, rows // _ROWS_PER_CHUNK)) for rows in (q_rows, kv_rows))
        # Halves of all members' rows are those of a zigzag, which stay whole.
        return (kq, kkv) if degree == 1 else (min(2, kq), min(2, kkv)), None
    least = -(-_ROWS_AND_HEADS // (max(1, q_rows) * problem.heads_per_kv_head))
    most = max(heads[1], least)
    if 2 * most > problem.kv_heads // degree:
        return (1, 1), None
    return (1, 1), (max(1, most // 4), most)


def suggested_ring_cut(
    problem: Problem, num_ranks: int, degree: int, ranks_per_node: int | None
) -> tuple[tuple[int, int], HeadSlices | None]:
    """Rotation is hidden without a cut. Exchanges are worth smaller calls and messages where they
    leave the node, or where they are the only transfers; the keys of a ring stay whole."""
    units = num_ranks // degree
    if units > 1 and degree <= (ranks_per_node or 8):
        return (1, 1), None
    (kq, kkv), heads = suggested_cut(problem, num_ranks, (1, units), degree)
    return (kq, kkv if units == 1 else 1), heads
