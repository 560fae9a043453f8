"""One side of a tile: the chunks of its queries, or of its keys and values, and their buffers.

The units of a tile row gather queries and reduce their partial results; those of a tile column do
so with keys. A *line* is such a row or column: a unit lies in one line of each side. `TilePass` has
two of these. A side only names rows, pieces and buffers; it makes no transfer.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple
from weakref import proxy

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.chunks import whole_rows
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.keep import GATHERED
from mesh_attention.plan.methods.parts.reduce import ReduceBy, Reduction, stacks
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.spans import Spans, joined, slice_spans

ALL_UNITS = "all"
Units = tuple[int, ...]


class SideKinds(NamedTuple):
    """What belongs to one side of a pass."""

    inputs: tuple[Kind, ...]  # what is gathered
    partials: tuple[Kind, ...]  # the partial results of a chunk
    merge_rule: MergeRule  # of partials
    backward: bool


def kinds_of_sides(direction: Direction, *, gather_out: bool) -> tuple[SideKinds, SideKinds]:
    """Of queries and of keys. With `delta` in place of O the backward pass gathers one number for
    each row and head instead of a whole output (algorithm.md, section 4)."""
    keys = (Kind.K, Kind.V)
    if direction is Direction.FORWARD:
        q = SideKinds((Kind.Q,), (Kind.OUT, Kind.LSE), MergeRule.SOFTMAX, False)
        return q, SideKinds(keys, (), MergeRule.SUM, False)
    statistic = Kind.OUT if gather_out else Kind.DELTA
    queries = (Kind.Q, Kind.GRAD_OUT, Kind.LSE, statistic)
    q = SideKinds(queries, (Kind.GRAD_Q,), MergeRule.SUM, True)
    return q, SideKinds(keys, (Kind.GRAD_K, Kind.GRAD_V), MergeRule.SUM, True)


class TileSide:
    def __init__(
        self,
        head_group: HeadGroup,
        tile: Tile,
        kinds: SideKinds,
        cut: PassCut,
        wanted: ReduceBy,
        per_node: int,
        *,
        keys: bool,
        gathered_as: Role,
    ) -> None:
        """`wanted`: how partials are to be reduced; `per_node`: units of a line that follow each
        other in a node; `gathered_as`: the role of queries, keys and values that are gathered."""
        self.head_group = head_group
        self.inputs, self.partials, self.merge_rule, _ = kinds
        self.kind = kinds.inputs[0]  # whose rows they are
        self.name = "KV" if keys else "Q"  # with the number of a line it names a group
        self.size = tile.b if keys else tile.a  # units of a line
        self._roles = dict.fromkeys(GATHERED, gathered_as) if self.size > 1 else {}
        # What the units of a line gather, and of it what is exchanged before.
        self.gathered, self.exchanged = self.inputs, self.inputs
        if kinds.backward:
            recalled = [kind for kind, role in self._roles.items() if role is Role.RECALLED]
            self.gathered = tuple(kind for kind in self.inputs if kind not in recalled)
            kept = head_group.kept if head_group.is_exchanged else ()
            self.exchanged = tuple(kind for kind in self.gathered if kind not in kept)
        self.line = tile.column if keys else tile.row  # of a unit
        self.members = tile.kv_group if keys else tile.q_group  # of a line
        self.partitions = tile.kv_partitions if keys else tile.q_group  # that a line gathers
        # The units that use a partition, where they are not those of its owner's line.
        self.users = tile.kv_users if keys and not tile.rotation and tile.b > 1 else None
        self.per_node = per_node
        self.chunks = head_group.chunks(self.kind, cut.chunks[keys], cut.slices)
        self.chunks_of_slice = len(self.chunks) // len(cut.slices)
        self.reduce_by = self._reduce_by(wanted)
        # Chunks of the same rows and other heads share their rows, and units of a line its buffers.
        self.own_rows = cache(partial(head_group.rows, self.kind))  # of a unit
        own = proxy(self)  # in a cycle with its caches it would outlive its plan
        self._gathered_rows = cache(partial(TileSide._rows_of_line, own))
        self.buffers = cache(partial(TileSide._buffers, own))  # that all units of a line hold alike

    @property
    def is_fetched(self) -> bool:
        """Whether chunks come one after the other: from the units of a line, or to this unit."""
        by_exchange = self.head_group.cut is not None and self.exchanged
        return bool((self.size > 1 and self.gathered) or by_exchange)

    @property
    def in_node(self) -> int | None:
        """Units of a line that follow each other in a node, where there are several."""
        return self.per_node if self.per_node > 1 else None

    def _reduce_by(self, wanted: ReduceBy) -> ReduceBy:
        if self.size == 1:
            return ReduceBy.LOCAL
        # Nodes that hold all of a line, or one unit of it each, leave nothing to combine first.
        alone = wanted is ReduceBy.NODES and self.per_node in (1, self.size)
        return ReduceBy.EXCHANGE if alone or self.users is not None else wanted

    def group(self, line: int) -> str:
        return self.head_group.group_name(f"{self.name}{line}")

    # Operands.

    def piece(self, kind: Kind, index: int) -> Piece:
        chunk = self.chunks[index]
        if self.size == 1:
            return chunk.local(self.head_group.local(kind))
        return Piece(f"{kind}.{index}", 0, self.size * chunk.size)

    def sums(self, index: int) -> tuple[Piece, ...]:
        rows = self.size * self.chunks[index].size
        return tuple(Piece(f"{kind}.{index}", 0, rows) for kind in self.partials)

    def empty(self, kind: str, index: int) -> list[Operation]:
        """Neutral partials of a chunk of which a unit computes nothing."""
        sums, task = self.sums(index), Task(kind, (index,), "empty")
        together = self.merge_rule is MergeRule.SOFTMAX
        outputs = [sums] if together else [(total,) for total in sums]
        return [Merge(task, self.merge_rule, (), totals) for totals in outputs]

    def spans(self, line: int, index: int) -> Spans:
        return self._gathered_rows(line, index % self.chunks_of_slice)

    def _rows_of_line(self, line: int, index: int) -> Spans:
        return self.rows_of(self.partitions(line), index)

    def rows_of(self, units: Units, index: int) -> Spans:
        """A chunk of these units as a gather lays it out."""
        layout, chunk = self.head_group.layout(self.kind), self.chunks[index]
        if layout.kind is LayoutKind.LISTED:
            return whole_rows([self.own_rows(unit) for unit in units], chunk)
        # The rows of the first unit, shifted by the rows of a unit for each unit after it.
        first, start = self.own_rows(0), chunk.start
        parts = tuple([slice_spans(first, start + a, start + b) for a, b in pairwise(chunk.cuts)])
        return _rows_of_units(parts, units, self.head_group.size(self.kind))

    def wire(self, partial: str) -> str:
        """The buffer in which a partial travels: itself where the precision is the same."""
        problem = self.head_group.problem
        same = problem.accumulate_bytes == problem.element_bytes
        return partial if same else f"{partial}.wire"

    def reduction(self, unit: int, index: int) -> Reduction:
        line, size, chunk = self.line(unit), self.size, self.chunks[index]
        if self.users is None:
            reduction = Reduction(self.reduce_by, self.group(line), size, chunk, num_owners=size)
            return reduction.of_member(self.members(line).index(unit), self.per_node)
        return Reduction(
            ReduceBy.EXCHANGE,
            self.head_group.group_name(ALL_UNITS),
            self.head_group.num_units,
            chunk,
            num_owners=size,
            owner_slots=self.partitions(line),
            user_slots=self.users(unit),
        )

    # Buffers.

    def _buffers(self, line: int) -> dict[str, Buffer]:
        made: list[Buffer] = []
        for chunk in self.chunks:
            rows = self.spans(line, chunk.index)
            for kind in self.inputs if self.size > 1 else ():
                role, name = self._roles.get(kind, Role.WORKSPACE), f"{kind}.{chunk.index}"
                made.append(self.head_group.buffer(name, kind, rows, chunk, role=role))
            for kind in self.partials:
                name = f"{kind}.{chunk.index}"
                made.append(self.head_group.buffer(name, kind, rows, chunk, Precision.ACCUMULATE))
                if not kind.is_statistic:  # where it travels itself this one takes its place
                    made.append(self.head_group.buffer(self.wire(name), kind, rows, chunk))
                elif self.reduce_by is ReduceBy.REDUCE_SCATTER:
                    made.append(self.head_group.buffer(f"{name}.all", kind, rows, chunk))
        return {buffer.name: buffer for buffer in made}

    def stack_buffers(self, unit: int) -> dict[str, Buffer]:
        """Where other units' partials of this unit's own chunks arrive."""
        made: dict[str, Buffer] = {}
        own, owners = self.own_rows(unit), list[Spans]()
        if self.reduce_by is ReduceBy.NODES:
            owners += map(self.own_rows, self.members(self.line(unit)))
        added = self.reduce_by is ReduceBy.REDUCE_SCATTER  # on the way; only LSEs arrive
        arrive = [kind for kind in self.partials if kind.is_statistic or not added]
        for chunk in self.chunks if self.reduce_by is not ReduceBy.LOCAL else ():
            reduction = self.reduction(unit, chunk.index)
            for kind in arrive:
                name = f"{kind}.{chunk.index}"
                name = name if kind.is_statistic else self.wire(name)
                for stack, rows in stacks(reduction, name, owners, own).items():
                    made[stack] = self.head_group.buffer(stack, kind, rows, chunk)
        return made


@lru_cache(maxsize=32)  # both passes, and cuts that differ in slices of heads, ask for the same
def _rows_of_units(parts: tuple[Spans, ...], units: Units, size: int) -> Spans:
    """Of each part the rows of each unit, `size` rows after those of the unit before it."""
    return joined(
        [(a + unit * size, b + unit * size) for spans in parts for unit in units for a, b in spans]
    )
