"""Head groups: how heads and tokens are shared out before a method begins.

With Ulysses degree U, U consecutive ranks form a *unit*: they swap tokens for heads, and then rank
i of every unit holds all of the unit's tokens for the i-th share of heads. The ranks with equal i
are head group i; a method runs on each head group as if its units were ranks. U = 1 is one head
group of all.

Shares are equal where the degree divides the heads and keeps KV heads whole. Otherwise nobody has
more than the heads divided by the degree, rounded up, which is as even as the work can be; and
where a share has room for a whole KV group shares end with a group, if one ends near: a KV head
beyond that end is held twice, and so are its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from math import gcd
from typing import NamedTuple

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.methods.parts.chunks import Chunk, by_heads, chunk_slots, chunks_between
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.spans import Spans, clip_spans, joined, slice_spans


def ulysses_degrees(problem: Problem, num_ranks: int | None = None) -> list[int]:
    """Degrees that divide the heads, and the ranks, such that every KV head stays whole."""
    group = problem.heads_per_kv_head
    return [
        degree
        for degree in range(1, problem.num_heads + 1)
        if problem.num_heads % degree == 0
        and (num_ranks is None or num_ranks % degree == 0)
        and (
            (problem.num_heads // degree) % group == 0 or group % (problem.num_heads // degree) == 0
        )
    ]


def chosen_degree(
    problem: Problem, num_ranks: int, degree: int | None, ranks_per_node: int | None
) -> int:
    """The given degree, if it fits; left out: the largest up to 8 (or a node) that works."""
    fits = ulysses_degrees(problem, num_ranks)
    if degree is None:
        return max(one for one in fits if one <= (ranks_per_node or 8))
    if degree not in fits:
        raise PlanError(
            f"ulysses={degree} does not share out {problem.num_heads} heads "
            f"({problem.kv_heads} KV heads) on {num_ranks} ranks; degrees that work: "
            f"{', '.join(map(str, fits))}"
        )
    return degree


@lru_cache(maxsize=256)
def head_shares(num_heads: int, kv_heads: int, degree: int) -> tuple[tuple[int, int], ...]:
    """The query heads of each of `degree` head groups.

    >>> head_shares(8, 8, 3), head_shares(12, 4, 5)
    (((0, 3), (3, 5), (5, 8)), ((0, 3), (3, 6), (6, 9), (9, 10), (10, 12)))
    """
    group, most = num_heads // kv_heads, -(-num_heads // degree)
    bounds = [0]
    for index in range(1, degree):
        rest = degree - index
        low = max(bounds[-1] + 1, num_heads - most * rest)
        high = min(bounds[-1] + most, num_heads - rest)
        even = index * num_heads // degree
        before = even - even % group
        ends = [e for e in (before, before + group) if low <= e <= high and most >= group]
        nearest = min(ends, key=lambda e: abs(e * degree - index * num_heads), default=even)
        bounds.append(min(max(nearest, low), high))
    return tuple(pairwise([*bounds, num_heads]))


@lru_cache(maxsize=64)  # all tensors and head groups of a rank ask for the same
def unit_rows(
    layout: Layout, degree: int, unit: int, chunks: tuple[Spans, ...] | None = None
) -> tuple[Spans, tuple[Spans, ...]]:
    """The places of a unit's rows, and for each member where its own lie among them.

    Members come one after the other, or in order of position where that makes long stretches of
    them: so a unit of zigzag partitions is a zigzag partition of larger blocks. With several chunks
    that is the order inside each of them: all members have an equal part of every chunk, given by
    the slots of a member.
    """
    if layout.kind is LayoutKind.LISTED or not unit:
        return _rows_of_unit(layout, degree, unit, chunks)
    places, members = unit_rows(layout, degree, 0, chunks)
    before = unit * degree * layout.slots
    return tuple([(a + before, b + before) for a, b in places]), members


def _rows_of_unit(
    layout: Layout, degree: int, unit: int, chunks: tuple[Spans, ...] | None
) -> tuple[Spans, tuple[Spans, ...]]:
    slots, first = layout.slots, unit * degree
    # Alone a rank has its rows as they are; a zigzag lies in order of position.
    by_position = layout.kind is LayoutKind.ZIGZAG or (
        layout.kind is LayoutKind.LISTED and degree > 1
    )
    places: list[tuple[int, int]] = []
    found: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    at = 0
    for chunk in chunks or (((0, slots),),):
        if layout.kind is LayoutKind.ZIGZAG:
            at += _add_zigzag(layout, first, chunk, at, places, found)
            continue
        parts = []  # (first position, places), member by member
        for rank in range(first, first + degree):
            place, whole = rank * slots, layout.parts(rank) if by_position else ((0, slots),)
            for a, b in chain.from_iterable(clip_spans(whole, *stretch) for stretch in chunk):
                position = layout.runs(place + a, place + a + 1)[0].start if by_position else rank
                parts.append((position, place + a, place + b))
        rows: dict[int, tuple[int, int]] = {}  # by the first place of each part
        for _, start, stop in sorted(parts):
            places.append((start, stop))
            rows[start] = (at, at + stop - start)
            at += stop - start
        for _, start, _ in parts:
            found[start // slots - first].append(rows[start])
    return tuple(places) if by_position else joined(places), tuple(map(tuple, found))


def _add_zigzag(
    layout: Layout,
    first: int,
    chunk: Spans,
    at: int,
    places: list[tuple[int, int]],
    found: list[list[tuple[int, int]]],
) -> int:
    """What `unit_rows` does for a chunk, and its size: ranks own the low halves in their order, and
    then the high halves in the other. Asked for again and again, of units of many ranks."""
    degree, slots, middle = len(found), layout.slots, layout.halves[1]
    spans = [span for stretch in chunk for span in clip_spans(layout.parts(0), *stretch)]
    sides = [sorted(s for s in spans if (s[0] >= middle) == high) for high in (False, True)]
    low, high = (sum(b - a for a, b in side) for side in sides)
    for side, ranks in zip(sides, (range(degree), range(degree - 1, -1, -1)), strict=True):
        places += [
            ((first + m) * slots + a, (first + m) * slots + b) for m in ranks for a, b in side
        ]
    for a, b in spans:
        size, side = b - a, sides[a >= middle]
        start = at + sum(d - c for c, d in side if c < a)
        step = low
        if a >= middle:
            start, step = start + degree * low + (degree - 1) * high, -high
        for member, rows in enumerate(found):
            rows.append((start + member * step, start + member * step + size))
    return degree * (low + high)


class PassCut(NamedTuple):
    """How finely the rows and heads of a unit are exchanged: chunks of queries and of keys, for
    each slice of heads, given by KV heads. A slice is exchanged at once where it is not chunked.
    `even`: chunks of rows have as much of both halves of a zigzag. `short_start`: the first chunk
    of keys is cut once more, so that there is something to compute sooner."""

    chunks: tuple[int, int]
    slices: tuple[int, ...]
    even: bool = False
    short_start: bool = False

    @property
    def is_whole(self) -> bool:
        return self.chunks == (1, 1) and len(self.slices) == 1


@dataclass(frozen=True)
class HeadGroup:
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    degree: int = 1
    index: int = 0
    shards: tuple[Layout, Layout] | None = None  # how queries and keys come, where otherwise
    cut: PassCut | None = None  # None: all is exchanged at once

    @property
    def has_alike(self) -> bool:
        """Whether all head groups have as many heads, and receive as much of every other."""
        return self.shards is None and self.degree in ulysses_degrees(self.problem)

    @property
    def is_exchanged(self) -> bool:
        """Whether a unit's own rows come from other ranks, and are no tensors of the caller."""
        return self.degree > 1 or self.shards is not None

    @property
    def num_units(self) -> int:
        return self.q_layout.num_ranks // self.degree

    @property
    def has_even_chunks(self) -> bool:
        """Whether some chunk has rows of both halves of a zigzag, from its two ends."""
        slots = self.slots(Kind.Q) + self.slots(Kind.K)
        return any(len(stretches) > 1 for stretches in slots)

    @property
    def has_short_start(self) -> bool:
        """Whether there is a chunk of keys more than asked for, before the others."""
        return self.cut is not None and len(self.slots(Kind.K)) > self.cut.chunks[1]

    def rank_of(self, unit: int) -> int:
        return unit * self.degree + self.index

    def layout(self, kind: Kind) -> Layout:
        return self.kv_layout if kind.is_key_side else self.q_layout

    def halves(self, kind: Kind) -> tuple[int, ...]:
        """Row boundaries inside a unit that a gather keeps apart."""
        return tuple(self.degree * half for half in self.layout(kind).halves)

    def size(self, kind: Kind) -> int:
        return self.degree * self.layout(kind).slots

    def chunks(
        self, kind: Kind, count: int, slices: tuple[int, ...] | None = None
    ) -> tuple[Chunk, ...]:
        """`count` chunks of rows for each slice of this head group's heads, given by KV heads."""
        if self.cut is not None:
            return self.exchanged(kind)
        rows = chunks_between(self.halves(kind), count)
        if len(self.stretches) > 1:
            sizes = [heads[kind.is_key_side] for heads in self.stretches]
            return by_heads(rows, sizes)
        if slices is None or len(slices) == 1:
            return rows
        first, last = self.heads(kind)
        return by_heads(rows, [size * (last - first) // sum(slices) for size in slices])

    def exchanged(self, kind: Kind) -> tuple[Chunk, ...]:
        """The chunks in which a tensor is exchanged, each with an equal part of every member."""
        return self._exchanged[kind.is_key_side]

    @cached_property
    def _exchanged(self) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
        return self._make_exchanged(Kind.Q), self._make_exchanged(Kind.K)

    def _make_exchanged(self, kind: Kind) -> tuple[Chunk, ...]:
        assert self.cut is not None
        parts, rows, at = self._parts(kind)[0], list[Chunk](), 0
        for index, stretches in enumerate(self.slots(kind)):
            sizes = [
                self.degree * (min(b, h2) - max(a, h1))
                for a, b in stretches
                for h1, h2 in pairwise(self.layout(kind).halves)
                if max(a, h1) < min(b, h2)
            ]
            cuts = tuple(accumulate(sizes, initial=0))
            rows.append(Chunk(index, at, at + cuts[-1], cuts, apart=True))
            at += cuts[-1]
        (first, last), slices = self.heads(kind), self.cut.slices
        if parts > 1:
            return by_heads(rows, [(last - first) // parts] * parts)
        return by_heads(rows, [size * (last - first) // sum(slices) for size in slices])

    def slots(self, kind: Kind) -> tuple[Spans, ...]:
        """Of each member, those of each chunk of rows that is exchanged."""
        return self._slots[kind.is_key_side]

    @cached_property
    def _slots(self) -> tuple[tuple[Spans, ...], tuple[Spans, ...]]:
        return self._make_slots(Kind.Q), self._make_slots(Kind.K)

    def _make_slots(self, kind: Kind) -> tuple[Spans, ...]:
        cut = self.cut or PassCut((1, 1), (1,))
        halves, count = self.layout(kind).halves, self._parts(kind)[1]
        short = cut.short_start and kind.is_key_side
        return chunk_slots(halves, count, even=cut.even, short_start=short)

    def _parts(self, kind: Kind) -> tuple[int, int]:
        """Parts of the heads, and chunks of rows. Queries of one KV head are cut by heads as far as
        that goes: so every part has all rows, and work is even under any mask."""
        if self.cut is None:
            return 1, 1
        count = self.cut.chunks[kind.is_key_side]
        (first, last), (first_kv, last_kv) = self.heads(Kind.Q), self.heads(Kind.K)
        parts = 1 if kind.is_key_side or last_kv - first_kv > 1 else gcd(count, last - first)
        return parts, count // parts

    def rows(self, kind: Kind, unit: int) -> Spans:
        """The places of a unit's rows."""
        return self._unit_rows(kind, unit)[0]

    def member_rows(self, kind: Kind, unit: int) -> tuple[Spans, ...]:
        """Of each member: where the parts of its own rows lie among the rows of its unit."""
        return self._unit_rows(kind, unit)[1]

    def _unit_rows(self, kind: Kind, unit: int) -> tuple[Spans, tuple[Spans, ...]]:
        return unit_rows(self.layout(kind), self.degree, unit, self.slots(kind))

    def heads(self, kind: Kind) -> tuple[int, int]:
        """This head group's heads; a KV head that serves several is held by each of them."""
        return self._heads[kind.is_key_side]

    @cached_property
    def _heads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        problem, group = self.problem, self.problem.heads_per_kv_head
        first, last = head_shares(problem.num_heads, problem.kv_heads, self.degree)[self.index]
        return (first, last), (first // group, -(-last // group))

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """(query heads, KV heads) of the stretches of heads in which every KV head has as many
        query heads: what one attention can take. One, unless a share cuts a KV group unevenly."""
        (first, last), group = self.heads(Kind.Q), self.problem.heads_per_kv_head
        parts = [
            min(last, (kv + 1) * group) - max(first, kv * group)
            for kv in range(*self.heads(Kind.K))
        ]
        return tuple((sum(same), len(same)) for same in (tuple(x) for _, x in groupby(parts)))

    def local(self, kind: Kind) -> str:
        """The name of this rank's own rows of a tensor inside the method."""
        return f"{kind.value}.u" if self.is_exchanged else kind.value

    def local_buffers(self, kind: Kind, unit: int, role: Role) -> list[Buffer]:
        """One, or one for each chunk that is exchanged."""
        held = Role.WORKSPACE if self.is_exchanged else role
        name, rows, heads = self.local(kind), self.rows(kind, unit), self.heads(kind)
        if self.cut is None:
            return [Buffer(name, kind, rows, heads, kind.precision, held)]
        return [
            Buffer(
                *(chunk.name(name), kind, slice_spans(rows, chunk.start, chunk.stop)),
                heads=heads if of is None else (heads[0] + of[0], heads[0] + of[1]),
                precision=kind.precision,
            )
            for chunk in self.exchanged(kind)
            for of in (chunk.heads,)
        ]

    def group_name(self, name: str) -> str:
        return name if self.degree == 1 else f"{name}.{self.index}"

    def on_all(self, groups: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """These groups of units as groups of ranks, on each head group."""
        degree = self.degree
        if degree == 1:
            return dict(groups)
        return {
            f"{name}.{index}": tuple([unit * degree + index for unit in units])
            for index in range(degree)
            for name, units in groups.items()
        }
