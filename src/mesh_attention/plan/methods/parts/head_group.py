"""Head groups: how heads and tokens are shared out before a method begins.

With Ulysses degree U, U consecutive ranks form a *unit*: they exchange tokens for heads, and then
rank i of every unit holds all tokens of the unit for the i-th share of heads. The ranks with equal
i are head group i; a method runs on each head group as if its units were ranks. U = 1 is one head
group of all ranks.

Shares are equal where the degree divides the heads and keeps KV heads whole. Otherwise no share is
larger than the heads divided by the degree, rounded up, which is as even as the work can be. A
share with room for a whole KV group then ends where the nearest group ends, if it can: a KV head
that two shares cut is held, and sent, twice.

Used by all builders; pure functions of the problem and its layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from math import gcd
from typing import NamedTuple

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Buffer, Kind, Precision, Role
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
    """The degree asked for, if it fits; None: the largest that works, up to 8 or a node."""
    fits = ulysses_degrees(problem, num_ranks)
    if degree is None:
        return max(fitting for fitting in fits if fitting <= (ranks_per_node or 8))
    if degree not in fits:
        raise PlanError(
            f"ulysses={degree} does not fit {problem.num_heads} heads ({problem.kv_heads} KV "
            f"heads) on {num_ranks} ranks; degrees that work: {', '.join(map(str, fits))}"
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
    """The places of a unit's rows, and for each member where its own rows are among them.

    Members come one after the other, or in order of position where that makes long ranges: a unit
    of zigzag partitions is a zigzag partition of larger blocks. With several chunks, each given by
    the slots of a member, that is the order inside each chunk; all members have an equal part of
    every chunk.
    """
    slots, first = layout.slots, unit * degree
    if unit and layout.kind is not LayoutKind.LISTED:
        places, members = unit_rows(layout, degree, 0, chunks)
        return tuple([(a + first * slots, b + first * slots) for a, b in places]), members
    # A rank alone has its rows as they are; a zigzag is in order of position anyway.
    by_position = layout.kind is LayoutKind.ZIGZAG or (
        layout.kind is LayoutKind.LISTED and degree > 1
    )
    unit_places: list[tuple[int, int]] = []
    member_rows: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    at = 0
    ranks = range(first, first + degree)
    own: Sequence[Sequence[tuple[int, Spans]]] = [[(rank, ((0, slots),))] for rank in ranks]
    if by_position:
        own = _shifted_parts(layout, ranks)
    for chunk in chunks or (((0, slots),),):
        parts = [  # (first position, places), member by member
            (shift + a, rank * slots + a, rank * slots + b)
            for rank, of_rank in zip(ranks, own, strict=True)
            for span in chunk
            for shift, part in of_rank
            for a, b in clip_spans(part, *span)
        ]
        rows: dict[int, tuple[int, int]] = {}  # by the first place of each part
        for _, start, stop in sorted(parts):
            unit_places.append((start, stop))
            rows[start] = (at, at + stop - start)
            at += stop - start
        for _, start, _ in parts:
            member_rows[start // slots - first].append(rows[start])
    places = tuple(unit_places) if by_position else joined(unit_places)
    return places, tuple(map(tuple, member_rows))


@lru_cache(maxsize=64)  # of all cuts
def _shifted_parts(layout: Layout, ranks: range) -> Sequence[Sequence[tuple[int, Spans]]]:
    """Of each rank, for each part: from a slot to its position, and the part."""
    slots = layout.slots
    return [
        [(layout.runs(r * slots + a, r * slots + b)[0].start - a, ((a, b),)) for a, b in parts]
        for r, parts in ((rank, layout.parts(rank)) for rank in ranks)
    ]


@lru_cache(maxsize=64)
def heads_of_groups(
    problem: Problem, degree: int
) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """The query heads and the KV heads of each head group."""
    group = problem.heads_per_kv_head
    shares = head_shares(problem.num_heads, problem.kv_heads, degree)
    return tuple([((a, b), (a // group, -(-b // group))) for a, b in shares])


class PassCut(NamedTuple):
    """How finely a pass cuts the rows and heads of a unit: (queries, keys) in chunks, for each
    slice of heads. `slices` counts KV heads. A slice that is not chunked is exchanged at once.

    `even`: chunks of rows have equal parts of both halves of a zigzag. `short_start`: the first
    chunk of keys is cut once more, so that computation begins sooner.
    """

    chunks: tuple[int, int]
    slices: tuple[int, ...]
    even: bool = False
    short_start: bool = False


class GroupSide:
    """The queries, or the keys and values, of one head group.

    layout    of all ranks; `size` are the rows of a unit in it
    heads     of this head group; a KV head that serves several head groups is held by each
    slots     of a member that belong to each chunk of rows that is exchanged
    parts     into which the heads of such chunks are cut besides. The queries of a single KV head
              are cut by heads as far as possible: then every part has all rows, and work is even
              under any mask
    """

    def __init__(self, group: HeadGroup, *, keys: bool) -> None:
        cut = group.cut or PassCut((1, 1), (1,))
        (first, last), kv_heads = of_group = heads_of_groups(group.problem, group.degree)[
            group.index
        ]
        self.heads = of_group[keys]
        self.layout = group.kv_layout if keys else group.q_layout
        self.size = group.degree * self.layout.slots
        count, self.parts = cut.chunks[keys], 1
        if not keys and kv_heads[1] - kv_heads[0] == 1:
            self.parts = gcd(count, last - first)
        short = cut.short_start and keys
        self.slots = chunk_slots(
            self.layout.halves, count // self.parts, even=cut.even, short_start=short
        )
        self._degree, self._slices, self._apart = group.degree, cut.slices, group.cut is not None

    @cached_property
    def exchanged(self) -> tuple[Chunk, ...]:
        """The chunks in which a tensor is exchanged, each with an equal part of every member: one
        of all rows and heads, or, where the head group is cut, some with buffers of their own."""
        slots = [[(self._degree * a, self._degree * b) for a, b in x] for x in self.slots]
        rows, held = (
            chunks_between(self.halves, slots, apart=self._apart),
            self.heads[1] - self.heads[0],
        )
        if self.parts > 1:
            return by_heads(rows, [held // self.parts] * self.parts)
        return by_heads(rows, [size * held // sum(self._slices) for size in self._slices])

    @property
    def halves(self) -> tuple[int, ...]:
        """Rows of a unit that a gather keeps apart."""
        return tuple([self._degree * x for x in self.layout.halves])

    def rows(self, unit: int) -> Spans:
        """The places of a unit's rows."""
        return unit_rows(self.layout, self._degree, unit, self.slots)[0]

    def chunk_rows(self, unit: int) -> tuple[Spans, ...]:
        """The places of a unit's rows of each chunk that is exchanged."""
        bounds = tuple([(chunk.start, chunk.stop) for chunk in self.exchanged])
        return _chunk_rows(self.layout, self._degree, unit, self.slots, bounds)

    def member_rows(self, unit: int, chunk: Chunk) -> tuple[Spans, ...]:
        """For each member: where its own rows are among the rows of a unit's chunk."""
        bounds = chunk.start, chunk.stop
        return _member_rows(self.layout, self._degree, unit, self.slots, *bounds)

    def heads_of(self, chunk: Chunk) -> tuple[int, int]:
        first, last = self.heads
        return (first + chunk.heads[0], first + chunk.heads[1]) if chunk.heads else (first, last)


@lru_cache(maxsize=64)  # all tensors have the same, and tiles and passes of a search
def _chunk_rows(
    layout: Layout, degree: int, unit: int, slots: tuple[Spans, ...], bounds: Spans
) -> tuple[Spans, ...]:
    rows = unit_rows(layout, degree, unit, slots)[0]
    return tuple([slice_spans(rows, *span) for span in bounds])


@lru_cache(maxsize=256)  # cuts, tiles and passes of a search have the same chunks
def _member_rows(
    layout: Layout, degree: int, unit: int, slots: tuple[Spans, ...], start: int, stop: int
) -> tuple[Spans, ...]:
    members = unit_rows(layout, degree, unit, slots)[1]
    return tuple(
        [tuple([(a - start, b - start) for a, b in clip_spans(x, start, stop)]) for x in members]
    )


@dataclass(frozen=True)
class HeadGroup:
    """Head group `index` of `degree`. `buffer` and `local_buffers` make its buffers, and `local`,
    `wire` and `group_name` say the names that operations use."""

    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    degree: int = 1
    index: int = 0
    shards: tuple[Layout, Layout] | None = None  # the caller's layouts, where they are others
    cut: PassCut | None = None  # None: all is exchanged at once
    kept: tuple[Kind, ...] = ()  # whose exchanged rows stay for the backward pass

    @cached_property
    def sides(self) -> tuple[GroupSide, GroupSide]:
        """Queries, and keys."""
        return GroupSide(self, keys=False), GroupSide(self, keys=True)

    def side(self, kind: Kind) -> GroupSide:
        return self.sides[kind.is_key_side]

    @property
    def is_exchanged(self) -> bool:
        """Whether a unit's own rows come from other ranks, and are not the caller's tensors."""
        return self.degree > 1 or self.shards is not None

    @property
    def num_units(self) -> int:
        return self.q_layout.num_ranks // self.degree

    def chunks(self, kind: Kind, count: int, slices: tuple[int, ...] = (1,)) -> tuple[Chunk, ...]:
        """`count` chunks of rows for each slice of this head group's heads, given by KV heads."""
        side = self.side(kind)
        if self.cut is not None:
            return side.exchanged
        rows = chunks_between(side.halves, chunk_slots(side.halves, count))
        uniform = self.uniform_heads
        if len(uniform) > 1:
            return by_heads(rows, [heads[kind.is_key_side] for heads in uniform])
        first, last = side.heads
        return by_heads(rows, [size * (last - first) // sum(slices) for size in slices])

    @property
    def uniform_heads(self) -> tuple[tuple[int, int], ...]:
        """The numbers of (query heads, KV heads) of the ranges of heads in which every KV head has
        the same number of query heads: each range is one attention. There is one range, unless a
        share cuts a KV group unevenly."""
        (q, kv), group = self.sides, self.problem.heads_per_kv_head
        parts = [
            min(q.heads[1], (head + 1) * group) - max(q.heads[0], head * group)
            for head in range(*kv.heads)
        ]
        return tuple((sum(same), len(same)) for same in (tuple(x) for _, x in groupby(parts)))

    def local(self, kind: Kind) -> str:
        """The name of this unit's own rows of a tensor inside the method."""
        return f"{kind.value}.u" if self.is_exchanged else kind.value

    def local_buffers(self, kind: Kind, unit: int, role: Role) -> list[Buffer]:
        """The buffers of this unit's own rows of a tensor: one for each chunk exchanged."""
        name, side = self.local(kind), self.side(kind)
        return [
            self.buffer(chunk.name(name), kind, rows, chunk, role=role, units=1)
            for chunk, rows in zip(side.exchanged, side.chunk_rows(unit), strict=True)
        ]

    def buffer(
        self,
        name: str,
        kind: Kind,
        rows: Spans,
        chunk: Chunk,
        precision: Precision | None = None,
        role: Role = Role.WORKSPACE,
        units: int | None = None,
    ) -> Buffer:
        """A buffer with the heads of a chunk. `units`: whose chunks the rows are, if that is known;
        to count many stretches takes longer."""
        heads = self.side(kind).heads_of(chunk)
        made = Buffer(name, kind, rows, heads, precision or kind.precision, role)
        return made if units is None else made.with_num_rows(units * chunk.size)

    def wire(self, kind: Kind, total: str) -> str:
        """The buffer in which a partial result travels: itself where the precision is the same."""
        same = kind.is_statistic or self.problem.accumulate_bytes == self.problem.element_bytes
        return total if same else f"{total}.wire"

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
