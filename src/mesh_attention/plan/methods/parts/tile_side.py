"""One side of a tile: the chunks of its queries, or of its keys and values, and their buffers.

The units of a tile row gather queries and reduce what belongs to them; those of a tile column do so
with keys. Either is a *line* here: a unit lies in one line of each side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.program import Merge, MergeRule, Operation, Task
from mesh_attention.plan.methods.parts.chunks import Chunk, whole_rows
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.reduce import ReduceBy, Reduction, stacks
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.spans import Spans, joined, slice_spans

ALL_UNITS = "all"
Units = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TileSide:
    head_group: HeadGroup
    name: str  # with the number of a line it names a group
    kind: Kind  # whose rows they are
    size: int  # units of a line
    line: Callable[[int], int]  # of a unit
    members: Callable[[int], Units]  # of a line
    partitions: Callable[[int], Units]  # that a line gathers
    users: Callable[[int], Units] | None  # of a partition, where not those of its owner's line
    inputs: tuple[Kind, ...]  # what is gathered
    partials: tuple[Kind, ...]  # accumulators of a chunk
    merge_rule: MergeRule  # of partials
    count: int  # chunks of rows, for each slice of the heads
    slices: tuple[int, ...]
    wanted: ReduceBy  # how partials are to be reduced
    per_node: int  # units of a line that follow each other in a node

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.head_group.chunks(self.kind, self.count, self.slices)

    @property
    def chunks_of_slice(self) -> int:
        return len(self.chunks) // len(self.slices)

    @property
    def parts_of_slice(self) -> int:
        """Parts of the heads of a slice, where chunks are cut by heads and not by rows."""
        heads = {chunk.heads for chunk in self.chunks}
        return len(heads) // len(self.slices)

    @property
    def is_fetched(self) -> bool:
        """Whether chunks come one after the other: from the units of a line, or to this unit."""
        return self.size > 1 or self.head_group.cut is not None

    @property
    def in_node(self) -> int | None:
        """Units of a line that follow each other in a node, where there are several."""
        return self.per_node if self.per_node > 1 else None

    @cached_property
    def reduce_by(self) -> ReduceBy:
        if self.size == 1:
            return ReduceBy.LOCAL
        # Nodes that hold all of a line, or one of it each, leave nothing to combine first.
        alone = self.wanted is ReduceBy.NODES and self.per_node in (1, self.size)
        return ReduceBy.EXCHANGE if alone or self.users is not None else self.wanted

    # Chunks of the same rows and other heads share their rows, and units of a line its buffers.

    @cached_property
    def own_rows(self) -> Callable[[int], Spans]:
        return cache(partial(self.head_group.rows, self.kind))

    @cached_property
    def _gathered_rows(self) -> Callable[[int, int], Spans]:
        return cache(lambda line, index: self.rows_of(self.partitions(line), index))

    @cached_property
    def buffers(self) -> Callable[[int], dict[str, Buffer]]:
        """Buffers that all units of a line hold alike."""
        return cache(self._buffers)

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

    def rows_of(self, units: Units, index: int) -> Spans:
        """A chunk of these units as a gather lays it out."""
        layout, chunk = self.head_group.layout(self.kind), self.chunks[index]
        if layout.kind is LayoutKind.LISTED:
            return whole_rows([self.own_rows(unit) for unit in units], chunk)
        # Those of the first unit, as many places further for each one after it.
        size, first = self.head_group.size(self.kind), self.own_rows(0)
        return joined(
            [
                (a + unit * size, b + unit * size)
                for start, stop in pairwise(chunk.cuts)
                for spans in (slice_spans(first, chunk.start + start, chunk.start + stop),)
                for unit in units
                for a, b in spans
            ]
        )

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
            *(ReduceBy.EXCHANGE, self.head_group.group_name(ALL_UNITS), self.head_group.num_units),
            chunk=chunk,
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
                made.append(self._buffer(f"{kind}.{chunk.index}", kind, rows, chunk))
            for kind in self.partials:
                name = f"{kind}.{chunk.index}"
                made.append(self._buffer(name, kind, rows, chunk, Precision.ACCUMULATE))
                if not kind.is_statistic:  # where it travels itself this one takes its place
                    made.append(self._buffer(self.wire(name), kind, rows, chunk))
                elif self.reduce_by is ReduceBy.REDUCE_SCATTER:
                    made.append(self._buffer(f"{name}.all", kind, rows, chunk))
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
                    made[stack] = self._buffer(stack, kind, rows, chunk)
        return made

    def _buffer(
        self, name: str, kind: Kind, rows: Spans, chunk: Chunk, precision: Precision | None = None
    ) -> Buffer:
        first, last = self.head_group.heads(kind)
        if chunk.heads is not None:
            first, last = first + chunk.heads[0], first + chunk.heads[1]
        return Buffer(name, kind, rows, (first, last), precision or kind.precision)
