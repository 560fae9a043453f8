"""Which rows ranks exchange before and after a method: who meets, who gives what, where it lies.

Ranks of a unit exchange tokens for heads: every member has the tokens of all of them then, so each
gives all of its own. Where callers keep contiguous shards and the method works in another layout,
all ranks meet in the same exchange: a rank gives to each unit the rows that it works on, for every
member its heads of them. So a row goes to its place in one step, with Ulysses or without, and what
stays on its rank is not sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.methods.parts.head_group import HeadGroup, unit_rows
from mesh_attention.plan.methods.parts.needed_rows import blocks_of, num_stretches
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.spans import Spans, joined

Array = NDArray[np.int64]
Cuts = tuple[Spans, Spans]  # of queries and of keys
MAX_STRETCHES = 4096  # of all ranks: each of them is a message; some for each rank always are


class ExchangedRows(Protocol):
    """An exchange, by members of the group in which a rank meets others for it."""

    def shard(self, keys: bool, rank: int) -> Spans:
        """The places of the rows of a rank's own shard."""
        ...

    def group(self, unit: int) -> str: ...

    def groups(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def indices(self) -> tuple[int, ...]:
        """The head group of each member."""
        ...

    def given(self, unit: int, index: int) -> tuple[Cuts, ...]:
        """To each member: the rows of this rank's own shard, counted in it."""
        ...

    def held(self, unit: int) -> tuple[Cuts, ...]:
        """Of each member: where its rows lie among those of a unit, in the same order."""
        ...

    def unfilled(self, unit: int) -> Cuts:
        """Rows of a unit that no shard has: padding of the layout that it works in."""
        ...


class UnitRows:
    """Tokens for heads inside units, which work on the rows of their own ranks."""

    def __init__(self, head_group: HeadGroup) -> None:
        self._group = head_group
        self.indices = tuple(range(head_group.degree))

    def shard(self, keys: bool, rank: int) -> Spans:
        slots = (self._group.kv_layout if keys else self._group.q_layout).slots
        return ((rank * slots, (rank + 1) * slots),)

    def group(self, unit: int) -> str:
        return f"U{unit}"

    def groups(self) -> dict[str, tuple[int, ...]]:
        degree = self._group.degree
        units = range(self._group.num_units) if degree > 1 else ()
        return {f"U{u}": tuple(range(u * degree, (u + 1) * degree)) for u in units}

    def given(self, unit: int, index: int) -> tuple[Cuts, ...]:
        group = self._group
        rank = unit * group.degree + index
        return ((group.q_layout.parts(rank), group.kv_layout.parts(rank)),) * group.degree

    def held(self, unit: int) -> tuple[Cuts, ...]:
        rows = (self._group.member_rows(kind, unit) for kind in (Kind.Q, Kind.K))
        return tuple(zip(*rows, strict=True))

    def unfilled(self, unit: int) -> Cuts:
        return (), ()


class RelayoutRows:
    """From shards that lie otherwise than the method works, among all ranks."""

    def __init__(self, head_group: HeadGroup, shards: tuple[Layout, Layout]) -> None:
        degree, layouts = head_group.degree, (head_group.q_layout, head_group.kv_layout)
        self._ranks = head_group.num_units * degree
        self._degree = degree
        self._sides = tuple(
            _moves(one, layout, degree) for one, layout in zip(shards, layouts, strict=True)
        )
        self.indices = tuple(range(degree)) * head_group.num_units

    def shard(self, keys: bool, rank: int) -> Spans:
        return self._sides[keys].shards[rank]

    def group(self, unit: int) -> str:
        return ALL_UNITS

    def groups(self) -> dict[str, tuple[int, ...]]:
        return {ALL_UNITS: tuple(range(self._ranks))}

    def given(self, unit: int, index: int) -> tuple[Cuts, ...]:
        rank = unit * self._degree + index
        q, kv = (side.of_source(rank) for side in self._sides)
        return tuple(
            (q.get(other, ()), kv.get(other, ()))
            for other in range(self._ranks // self._degree)
            for _ in range(self._degree)
        )

    def held(self, unit: int) -> tuple[Cuts, ...]:
        q, kv = (side.of_unit(unit) for side in self._sides)
        return tuple((q.get(rank, ()), kv.get(rank, ())) for rank in range(self._ranks))

    def unfilled(self, unit: int) -> Cuts:
        q, kv = (side.unfilled(unit) for side in self._sides)
        return q, kv


class _Moves(NamedTuple):
    """Stretches of rows, in order of position: from rows of a rank's shard to rows of a unit."""

    sources: Array
    source_rows: Array
    units: Array
    unit_rows: Array
    sizes: Array
    unit_size: int
    shards: tuple[Spans, ...]  # the places of the rows of each shard

    def of_source(self, rank: int) -> dict[int, Spans]:
        """By unit."""
        return self._spans(self.sources == rank, self.units, self.source_rows)

    def of_unit(self, unit: int) -> dict[int, Spans]:
        """By the rank whose shard they are in."""
        return self._spans(self.units == unit, self.sources, self.unit_rows)

    def _spans(self, which: NDArray[np.bool_], others: Array, rows: Array) -> dict[int, Spans]:
        found: dict[int, list[tuple[int, int]]] = {}
        columns = (column[which].tolist() for column in (others, rows, self.sizes))
        for other, row, size in zip(*columns, strict=True):
            found.setdefault(other, []).append((row, row + size))
        return {other: tuple(spans) for other, spans in found.items()}

    def unfilled(self, unit: int) -> Spans:
        filled = sorted(span for spans in self.of_unit(unit).values() for span in spans)
        starts, stops = [0], list[int]()
        for start, stop in filled:
            stops.append(start)
            starts.append(stop)
        stops.append(self.unit_size)
        return tuple((a, b) for a, b in zip(starts, stops, strict=True) if a < b)


@lru_cache(maxsize=16)
def _moves(shards: Layout, layout: Layout, degree: int) -> _Moves:
    """A layout pads at least as much as contiguous shards do: it has a place for all they have."""
    _refuse_many_stretches(layout)
    there, here = (_by_start(*blocks_of(one)) for one in (shards, layout))
    edges = np.unique(np.concatenate([there[0], here[0]]))
    edges = edges[edges < shards.padded_tokens]
    sizes = np.diff(edges, append=shards.padded_tokens)
    sources, source_rows = np.divmod(_follow(there, edges), shards.slots)
    places = _follow(here, edges)
    size = layout.slots * degree
    spans = [unit_rows(layout, degree, unit)[0] for unit in range(layout.num_ranks // degree)]
    table = np.array([span for rows in spans for span in rows], dtype=np.int64)
    lengths = table[:, 1] - table[:, 0]
    within = (np.cumsum(lengths) - lengths) % size  # of each span among the rows of its unit
    units, rows = places // size, _follow(_by_start(table[:, 0], lengths, within), places)
    # What follows the stretch before it on both sides is one with it.
    new = np.ones(len(edges), dtype=np.bool_)
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


_Table = tuple[Array, Array]  # where stretches begin, in order, and where they lie


def _by_start(starts: Array, sizes: Array, places: Array) -> _Table:
    order = np.argsort(starts)
    return starts[order], places[order]


def _follow(table: _Table, what: Array) -> Array:
    starts, places = table
    at = np.searchsorted(starts, what, side="right") - 1
    found: Array = places[at] + what - starts[at]
    return found


def can_relayout(layout: Layout) -> bool:
    return num_stretches(layout) <= max(MAX_STRETCHES, 2 * layout.num_ranks)


def _refuse_many_stretches(layout: Layout) -> None:
    if can_relayout(layout):
        return
    ways = f"give a stripe_block of at least {-(-layout.num_tokens // MAX_STRETCHES)}"
    if layout.kind is LayoutKind.LISTED:
        ways = "list fewer and longer 'stretches'"
    raise PlanError(
        f"relayout=True with layout={layout.kind}: it cuts the sequence into "
        f"{num_stretches(layout)} stretches, each of which would be a message of its own; at most "
        f"{MAX_STRETCHES} are supported: {ways}, or layout=zigzag"
    )
