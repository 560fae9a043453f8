"""One side of a tile on one head group: queries, or keys and values.

The units of a tile row gather queries and reduce their partial results; those of a tile column do
so with keys. A *line* is such a row or column: a unit lies in one line of each side. A side names
the rows, pieces and buffers of its chunks, and makes their gathers and reductions. `TilePass` has
two of them.

Names inside a program: `q`, `k`, `v`, ... are the caller's; `q.0` is Q chunk 0 of the whole Q
group, `out.0`, `lse.0` its partial output; `.wire` the copy that is sent, `.in` the partials that
arrive, `.all` the global LSE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple
from weakref import proxy

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Merge,
    MergeRule,
    Move,
    Operation,
    Task,
)
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.chunks import in_whole, whole_rows
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.reduce import PartialBuffers, ReduceBy, Reduction, by_member
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.spans import Spans, joined, slice_spans

ALL_UNITS = "all"
GATHER_Q, GATHER_KV = "AG-Q", "AG-KV"  # kinds of tasks
_GATHERED = (Kind.Q, Kind.K, Kind.V)  # what may stay for the backward pass
Kinds = tuple[Kind, ...]


class SideKinds(NamedTuple):
    """What belongs to one side of a pass."""

    inputs: Kinds  # what is gathered
    partials: tuple[Kinds, ...]  # the partial results of a chunk, by what one merge combines
    merge_rule: MergeRule
    reduce_kind: str  # of the tasks that reduce them; empty where there are none
    backward: bool

    def gathered_as(self, *, keeps: bool) -> dict[Kind, Role]:
        """The roles of what may stay for the backward pass, if it `keeps`. What that pass recalls
        is not gathered again."""
        kept = Role.RECALLED if self.backward else Role.KEPT
        return dict.fromkeys(_GATHERED, kept if keeps else Role.WORKSPACE)


def kinds_of_sides(direction: Direction, *, gather_out: bool) -> tuple[SideKinds, SideKinds]:
    """Of queries and of keys. With `delta` in place of O the backward pass gathers one number for
    each row and head instead of a whole output (algorithm.md, section 4)."""
    keys = (Kind.K, Kind.V)
    if direction is Direction.FORWARD:
        q = SideKinds((Kind.Q,), ((Kind.OUT, Kind.LSE),), MergeRule.SOFTMAX, "RS-Q", False)
        return q, SideKinds(keys, (), MergeRule.SUM, "", False)
    statistic = Kind.OUT if gather_out else Kind.DELTA
    queries = (Kind.Q, Kind.GRAD_OUT, Kind.LSE, statistic)
    q = SideKinds(queries, ((Kind.GRAD_Q,),), MergeRule.SUM, "RS-dQ", True)
    gradients = ((Kind.GRAD_K,), (Kind.GRAD_V,))
    return q, SideKinds(keys, gradients, MergeRule.SUM, "RS-dKV", True)


@dataclass(frozen=True)
class Tiling:
    """A pass of a tile on one head group, as both of its sides read it. Pairs are of queries and of
    keys."""

    head_group: HeadGroup
    direction: Direction
    tile: Tile
    cut: PassCut
    reduce_by: ReduceBy  # how partials are to be reduced
    gather_out: bool
    per_node: tuple[int, int]  # units of a line that follow each other in a node
    rotates: tuple[bool, bool]  # blocks go round, and are not gathered
    keeps_gathered: bool  # what is gathered stays for the backward pass


class TileSide:
    """Chunks are numbered through all slices of heads. `own` are the rows that units have before
    they gather; `inputs`, `gathered` and `exchanged` are kinds of tensors: what an attention reads,
    what of it a line gathers, and what of that ranks exchange for heads before."""

    def __init__(self, tiling: Tiling, *, keys: bool) -> None:
        head_group, tile, cut = tiling.head_group, tiling.tile, tiling.cut
        kinds = kinds_of_sides(tiling.direction, gather_out=tiling.gather_out)[keys]
        self.head_group, self.rotates = head_group, tiling.rotates[keys]
        self.inputs, self.together, self.merge_rule, self.reduce_kind, backward = kinds
        self.partials = tuple([kind for group in self.together for kind in group])
        self.gather_kind = GATHER_KV if keys else GATHER_Q
        self.own = head_group.sides[keys]
        self._name = "KV" if keys else "Q"  # with the number of a line it names a group
        self.size = tile.b if keys else tile.a  # units of a line
        self.keeps_gathered = tiling.keeps_gathered and not self.rotates
        self._roles = kinds.gathered_as(keeps=self.keeps_gathered) if self.size > 1 else {}
        self.gathered = tuple([x for x in self.inputs if self._roles.get(x) is not Role.RECALLED])
        held = head_group.kept if backward and head_group.is_exchanged else ()
        self.exchanged = tuple([kind for kind in self.gathered if kind not in held])
        self.line = tile.column if keys else tile.row  # of a unit
        self.members = tile.kv_group if keys else tile.q_group  # of a line
        self._partitions = tile.kv_partitions if keys else tile.q_group  # that a line gathers
        # The units that use a partition, where they are not those of its owner's line.
        self._users = tile.kv_users if keys and not tile.rotation and tile.b > 1 else None
        self.per_node = per_node = tiling.per_node[keys]  # units of a line that are in a node
        self.chunks = head_group.chunks(self.inputs[0], cut.chunks[keys], cut.slices)
        self.chunks_of_slice = len(self.chunks) // len(cut.slices)
        # Whether chunks come one after the other: from the units of a line, or to this unit.
        by_exchange = head_group.cut is not None and self.exchanged
        self.is_fetched = bool((self.size > 1 and self.gathered) or by_exchange)
        self.reduce_by = tiling.reduce_by
        if self.size == 1:
            self.reduce_by = ReduceBy.LOCAL
        elif self._users or (tiling.reduce_by is ReduceBy.NODES and per_node in (1, self.size)):
            # Nodes that hold all of a line, or one unit of it each, leave nothing to combine first.
            self.reduce_by = ReduceBy.EXCHANGE
        # Chunks of the same rows and other heads share their rows, and units of a line its buffers.
        self.own_rows = cache(self.own.rows)  # of a unit
        own = proxy(self)  # in a cycle with its caches it would outlive its plan
        self._gathered_rows = cache(partial(TileSide._rows_of_line, own))
        self.buffers = cache(partial(TileSide._buffers, own))  # that all units of a line hold alike

    def groups(self, lines: int) -> dict[str, tuple[int, ...]]:
        """Groups of units, by names that all head groups have alike."""
        if self._users is not None:
            return {ALL_UNITS: tuple(range(lines * self.size))}
        named = {f"{self._name}{line}": self.members(line) for line in range(lines)}
        return named if self.size > 1 else {}

    def group(self, line: int) -> str:
        return self.head_group.group_name(f"{self._name}{line}")

    # Operands.

    def piece(self, kind: Kind, index: int) -> Piece:
        chunk = self.chunks[index]
        if self.size == 1:
            return chunk.local(self.head_group.local(kind))
        return Piece(f"{kind}.{index}", 0, self.size * chunk.size)

    def pieces(self, index: int) -> dict[Kind, Piece]:
        """What an attention reads of a chunk."""
        return {kind: self.piece(kind, index) for kind in self.inputs}

    def _sum(self, kind: Kind, index: int) -> Piece:
        return Piece(f"{kind}.{index}", 0, self.size * self.chunks[index].size)

    def sums(self, index: int) -> tuple[Piece, ...]:
        """The accumulators of a chunk."""
        return tuple([self._sum(kind, index) for kind in self.partials])

    def empty(self, task: Task, index: int) -> list[Operation]:
        """Neutral partials of a chunk of which a unit computes nothing."""
        sums = [tuple([self._sum(kind, index) for kind in group]) for group in self.together]
        return [Merge(task, self.merge_rule, (), totals) for totals in sums]

    def spans(self, line: int, index: int) -> Spans:
        return self._gathered_rows(line, index % self.chunks_of_slice)

    def _rows_of_line(self, line: int, index: int) -> Spans:
        return self.rows_of(self._partitions(line), index)

    def rows_of(self, units: tuple[int, ...], index: int) -> Spans:
        """A chunk of these units as a gather lays it out."""
        layout, chunk = self.own.layout, self.chunks[index]
        if layout.kind is LayoutKind.LISTED:
            return whole_rows([self.own_rows(unit) for unit in units], chunk)
        # The rows of the first unit, shifted by the rows of a unit for each unit after it.
        first, start = self.own_rows(0), chunk.start
        parts = tuple([slice_spans(first, start + a, start + b) for a, b in pairwise(chunk.cuts)])
        return _rows_of_units(parts, units, self.own.size)

    # Transfers.

    def shared_by(self, task: Task, unit: int) -> int:
        """Units with the same number have the same operations for a task."""
        by_nodes = task.kind == self.reduce_kind and self.reduce_by is ReduceBy.NODES
        return unit if by_nodes or self._users is not None else self.line(unit)

    def gather(self, unit: int, index: int) -> list[Operation]:
        if self.size == 1 or not self.gathered:
            return []
        chunk, task = self.chunks[index], Task(self.gather_kind, (index,))
        if self._users is None:
            return [AllGather(task, self.group(self.line(unit)), self.moves(index))]
        reduction = self.reduction(unit, index)
        names = [(self.head_group.local(kind), f"{kind}.{index}") for kind in self.gathered]
        own = tuple([piece for name, _ in names for piece in chunk.local_parts(name)])
        taken = {
            owner: tuple([Piece(name, a, b) for _, name in names for a, b in rows])
            for at, owner in enumerate(reduction.owners)
            for rows in (in_whole(at, self.size, chunk),)
        }
        size, sends = reduction.group_size, dict.fromkeys(reduction.users, own)
        return [AllToAll(task, reduction.group, by_member(size, sends), by_member(size, taken))]

    def moves(self, index: int) -> tuple[Move, ...]:
        chunk = self.chunks[index]
        return tuple(
            [
                Move(chunk.local(self.head_group.local(kind)), self.piece(kind, index), chunk.cuts)
                for kind in self.gathered
            ]
        )

    def reduce(self, unit: int, index: int) -> list[Operation]:
        def partial_of(kind: Kind) -> PartialBuffers:
            total = f"{kind}.{index}"
            return PartialBuffers(
                total, self.head_group.wire(kind, total), self.head_group.local(kind)
            )

        tensors = [tuple(map(partial_of, group)) for group in self.together]
        task = Task(self.reduce_kind, (index,))
        return self.reduction(unit, index).operations(task, self.merge_rule, tensors)

    def reduction(self, unit: int, index: int) -> Reduction:
        line, group, chunk = self.line(unit), self.head_group, self.chunks[index]
        if self._users is None:
            everybody, member = range(self.size), self.members(line).index(unit)
            names = (self.reduce_by, self.group(line), self.size, chunk)
            return Reduction(*names, everybody, everybody, member, self.per_node)
        names = (self.reduce_by, group.group_name(ALL_UNITS), group.num_units, chunk)
        return Reduction(*names, self._partitions(line), self._users(unit))

    # Buffers.

    def _buffers(self, line: int) -> dict[str, Buffer]:
        made: list[Buffer] = []
        for chunk in self.chunks:
            rows = self.spans(line, chunk.index)
            make = partial(self.head_group.buffer, units=len(self._partitions(line)))
            for kind in self.inputs if self.size > 1 else ():
                role = self._roles.get(kind, Role.WORKSPACE)
                made.append(make(f"{kind}.{chunk.index}", kind, rows, chunk, role=role))
            for kind in self.partials:
                name = f"{kind}.{chunk.index}"
                made.append(make(name, kind, rows, chunk, Precision.ACCUMULATE))
                if not kind.is_statistic:  # where it travels itself this one takes its place
                    made.append(make(self.head_group.wire(kind, name), kind, rows, chunk))
                elif self.reduce_by is ReduceBy.REDUCE_SCATTER:
                    made.append(make(f"{name}.all", kind, rows, chunk))
        return {buffer.name: buffer for buffer in made}

    def stack_buffers(self, unit: int) -> dict[str, Buffer]:
        """Where other units' partials of this unit's own chunks arrive."""
        made: dict[str, Buffer] = {}
        if self.reduce_by is ReduceBy.LOCAL or not self.partials:
            return made
        own, owned = self.own_rows(unit), list[Spans]()
        if self.reduce_by is ReduceBy.NODES:
            owned += map(self.own_rows, self.members(self.line(unit)))
        added = self.reduce_by is ReduceBy.REDUCE_SCATTER  # on the way; only LSEs arrive
        for chunk in self.chunks:
            reduction = self.reduction(unit, chunk.index)
            for kind in self.partials:
                if kind.is_statistic or not added:
                    name = self.head_group.wire(kind, f"{kind}.{chunk.index}")
                    for stack, rows in reduction.stacks(name, owned, own).items():
                        made[stack] = self.head_group.buffer(stack, kind, rows, chunk)
        return made


@lru_cache(maxsize=32)  # both passes, and cuts that differ in slices of heads, ask for the same
def _rows_of_units(parts: tuple[Spans, ...], units: tuple[int, ...], size: int) -> Spans:
    """Of each part the rows of each unit, `size` rows after those of the unit before it."""
    return joined(
        [(a + unit * size, b + unit * size) for spans in parts for unit in units for a, b in spans]
    )
