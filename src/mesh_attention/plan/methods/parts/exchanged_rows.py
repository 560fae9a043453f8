"""Which rows and heads ranks exchange around a method: who meets, who sends what, where it goes.

`UnitRows`: the ranks of a unit exchange tokens for heads, so each sends all of its rows to all
others. `RelayoutRows`: where callers keep contiguous shards and the method works in another layout,
all ranks meet in one exchange. A rank sends to each unit the rows that the unit works on, for every
member its heads of them. So a row reaches its place in one step, with Ulysses or without, and rows
that stay on their rank are not sent. `KvReplicas`: the head groups that hold each KV head.

Used by `exchange.py`; pure functions of layouts and head groups.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.methods.parts.chunks import Chunk
from mesh_attention.plan.methods.parts.head_group import HeadGroup, heads_of_groups, unit_rows
from mesh_attention.plan.methods.parts.needed_rows import blocks_of, check_ranges
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.spans import Spans, cut, joined

Array = NDArray[np.int64]
Cuts = tuple[Spans, Spans]  # of queries and of keys


class UnitRows:
    """Rows exchanged inside units, which work on the rows of their own ranks."""

    def __init__(self, head_group: HeadGroup) -> None:
        self._group = head_group

    def shard(self, keys: bool, rank: int) -> Spans:
        """The places of the rows of a rank's own shard."""
        slots = (self._group.kv_layout if keys else self._group.q_layout).slots
        return ((rank * slots, (rank + 1) * slots),)

    def group(self, unit: int) -> str:
        """The group in which the ranks of a unit meet others."""
        return f"U{unit}"

    def groups(self) -> dict[str, tuple[int, ...]]:
        degree = self._group.degree
        units = range(self._group.num_units) if degree > 1 else ()
        return {f"U{u}": tuple(range(u * degree, (u + 1) * degree)) for u in units}

    def sent(self, unit: int, index: int) -> tuple[Cuts, ...]:
        """To each unit of the group: rows of this rank's own shard, counted in it. Every member of
        that unit receives its heads of them."""
        rank = unit * self._group.degree + index
        return ((self._group.q_layout.parts(rank), self._group.kv_layout.parts(rank)),)

    def in_unit(self, unit: int, chunk: Chunk, *, keys: bool) -> tuple[Spans, ...]:
        """Of each member of the group: where its rows are among those of a unit's chunk."""
        return self._group.sides[keys].member_rows(unit, chunk)

    def like(self, unit: int) -> int:
        """The first unit of which the rows lie as in this one, counted in the unit."""
        layouts = self._group.q_layout, self._group.kv_layout
        return unit if any(x.kind is LayoutKind.LISTED for x in layouts) else 0

    def unfilled(self, unit: int) -> Cuts:
        """Rows of a unit that no shard has: padding of the layout that the method works in."""
        return (), ()


class RelayoutRows:
    """As `UnitRows`, from shards in another layout, among all ranks."""

    def __init__(self, head_group: HeadGroup, shards: tuple[Layout, Layout]) -> None:
        degree, layouts = head_group.degree, (head_group.q_layout, head_group.kv_layout)
        self._ranks = head_group.num_units * degree
        self._degree = degree
        self._sides = tuple(
            _moves(shard, layout, degree) for shard, layout in zip(shards, layouts, strict=True)
        )

    def shard(self, keys: bool, rank: int) -> Spans:
        return self._sides[keys].shards[rank]

    def group(self, unit: int) -> str:
        return ALL_UNITS

    def groups(self) -> dict[str, tuple[int, ...]]:
        return {ALL_UNITS: tuple(range(self._ranks))}

    def sent(self, unit: int, index: int) -> tuple[Cuts, ...]:
        rank = unit * self._degree + index
        q, kv = (side.of_source(rank) for side in self._sides)
        units = range(self._ranks // self._degree)
        return tuple((q.get(other, ()), kv.get(other, ())) for other in units)

    def in_unit(self, unit: int, chunk: Chunk, *, keys: bool) -> tuple[Spans, ...]:
        rows = self._sides[keys].of_unit(unit)
        return tuple(rows.get(rank, ()) for rank in range(self._ranks))

    def like(self, unit: int) -> int:
        return unit

    def unfilled(self, unit: int) -> Cuts:
        q, kv = (side.unfilled(unit) for side in self._sides)
        return q, kv


class _Moves(NamedTuple):
    """Ranges of rows, in order of position: from rows of a rank's shard to rows of a unit."""

    sources: Array
    source_rows: Array
    units: Array
    unit_rows: Array
    sizes: Array
    unit_size: int
    shards: tuple[Spans, ...]  # the places of the rows of each shard

    def of_source(self, rank: int) -> dict[int, Spans]:
        """Rows of a rank's shard, by unit."""
        return self._spans(self.sources == rank, self.units, self.source_rows)

    def of_unit(self, unit: int) -> dict[int, Spans]:
        """Rows of a unit, by the rank whose shard they are in."""
        return self._spans(self.units == unit, self.sources, self.unit_rows)

    def _spans(self, which: NDArray[np.bool_], others: Array, rows: Array) -> dict[int, Spans]:
        by_other: dict[int, list[tuple[int, int]]] = {}
        columns = (column[which].tolist() for column in (others, rows, self.sizes))
        for other, row, size in zip(*columns, strict=True):
            by_other.setdefault(other, []).append((row, row + size))
        return {other: tuple(spans) for other, spans in by_other.items()}

    def unfilled(self, unit: int) -> Spans:
        filled = sorted(span for spans in self.of_unit(unit).values() for span in spans)
        edges = [0, *(edge for span in filled for edge in span), self.unit_size]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


@lru_cache(maxsize=16)
def _moves(shards: Layout, layout: Layout, degree: int) -> _Moves:
    """A layout pads at least as much as contiguous shards do: it has a place for all their rows."""
    what = f"relayout=True with layout={layout.kind}: it cuts the sequence into"
    check_ranges(layout, what, "zigzag")
    (shard_starts, shard_stops, shard_places), (starts, stops, own_places) = map(
        _blocks_by_start, (shards, layout)
    )
    index, at, low, high = cut(shard_starts, shard_stops, starts, stops)
    places, sizes = own_places[at] + low - starts[at], high - low
    at_source = shard_places[index] + low - shard_starts[index]
    sources, source_rows = np.divmod(at_source, shards.slots)
    size = layout.slots * degree
    spans = [unit_rows(layout, degree, unit)[0] for unit in range(layout.num_ranks // degree)]
    table = np.array([span for rows in spans for span in rows], dtype=np.int64)
    lengths = table[:, 1] - table[:, 0]
    first_rows = (np.cumsum(lengths) - lengths) % size  # of each span among the rows of its unit
    order = np.argsort(table[:, 0])
    at = order[np.searchsorted(table[order, 0], places, side="right") - 1]
    units, rows = places // size, first_rows[at] + places - table[at, 0]
    # A range that follows the range before it on both sides is one with it.
    new = np.ones(len(places), dtype=np.bool_)
    columns = (sources, source_rows, units, rows)
    steps = (0, sizes[:-1], 0, sizes[:-1])
    new[1:] = np.any([x[1:] != x[:-1] + step for x, step in zip(columns, steps, strict=True)], 0)
    at = np.flatnonzero(new)
    own: list[list[tuple[int, int]]] = [[] for _ in range(shards.num_ranks)]
    for rank, start, stop in np.stack([sources, places, places + sizes], 1).tolist():
        own[rank].append((start, stop))
    return _Moves(
        sources[at],
        source_rows[at],
        units[at],
        rows[at],
        sizes=np.add.reduceat(sizes, at),
        unit_size=size,
        shards=tuple(map(joined, own)),
    )


def _blocks_by_start(layout: Layout) -> tuple[Array, Array, Array]:
    """Starts and stops of blocks of consecutive positions, in order, and their places."""
    starts, sizes, places = blocks_of(layout)
    order = np.argsort(starts)
    return starts[order], (starts + sizes)[order], places[order]


class Part(NamedTuple):
    """Heads of a head group whose results arrive in one buffer of their owner."""

    copy: str  # the end of that buffer's name: nothing, or `.copy1`
    there: tuple[int, int]  # the heads inside that buffer
    here: tuple[int, int] | None  # inside the head group's own heads; None: all of them


HeadParts = tuple[list[Part], list[Part]]  # of query heads, and of KV heads


class KvReplicas:
    """The head groups that hold each KV head.

    With fewer KV heads than ranks, and wherever a share of the query heads ends inside a KV group,
    several head groups hold a KV head, and each has the gradients of its own query heads. These
    arrive in copies, copy c from the c-th holder, and the owner adds them.
    """

    def __init__(self, problem: Problem, degree: int) -> None:
        groups = heads_of_groups(problem, degree)
        self._first: dict[int, int] = {}  # holder of each head
        times = self._times = [0] * problem.kv_heads
        for index, (_, kv_heads) in enumerate(groups):
            for head in range(*kv_heads):
                self._first.setdefault(head, index)
                times[head] += 1
        # A copy has room from the first head that comes to it to the last.
        self.copies: list[tuple[int, int]] = []
        for copy in range(max(times) if max(times) > 1 else 0):
            heads = [head for head, count in enumerate(times) if count > max(copy, 1)]
            self.copies.append((heads[0], heads[-1] + 1))
        # The heads of each sum, and where they are in each copy; None is all of a buffer.
        self.sums = [
            (
                _inside((first, stop), (0, len(times))),
                [_inside((first, stop), copy) for copy in self.copies[: times[first]]],
            )
            for first, stop in _equal_runs(times)
            if times[first] > 1
        ]
        # Of each head group: of its query heads, and of its KV heads. Only results of KV heads
        # that several head groups hold have parts.
        self._whole = [([Part("", q, None)], [Part("", kv, None)]) for q, kv in groups]
        self._parts = [
            (of_queries, self._key_parts(index, kv_heads))
            for index, ((of_queries, _), (_, kv_heads)) in enumerate(
                zip(self._whole, groups, strict=True)
            )
        ]

    def of(self, incoming: bool) -> list[HeadParts]:
        """The parts of each head group."""
        return self._whole if incoming else self._parts

    def _key_parts(self, index: int, held: tuple[int, int]) -> list[Part]:
        low, high = held
        if not self.copies:
            return [Part("", held, None)]
        alone = -1
        copies = [
            index - self._first[head] if self._times[head] > 1 else alone
            for head in range(low, high)
        ]
        parts = []
        for a, b in _equal_runs(copies):
            copy, heads = copies[a], (low + a, low + b)
            start = 0 if copy == alone else self.copies[copy][0]
            name = "" if copy == alone else f".copy{copy}"
            there = (heads[0] - start, heads[1] - start)
            parts.append(Part(name, there, _inside(heads, held)))
        return parts


kv_replicas = lru_cache(maxsize=16)(KvReplicas)  # cuts of a search have the same


def _inside(heads: tuple[int, int], buffer: tuple[int, int]) -> tuple[int, int] | None:
    """Heads counted inside a buffer; None if they are all that it has."""
    return None if heads == buffer else (heads[0] - buffer[0], heads[1] - buffer[0])


def _equal_runs(values: list[int]) -> list[tuple[int, int]]:
    """The (start, stop) of each run of equal neighbours.

    >>> _equal_runs([2, 2, 1])
    [(0, 2), (2, 3)]
    """
    changes = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    return list(pairwise([0, *changes, len(values)]))
