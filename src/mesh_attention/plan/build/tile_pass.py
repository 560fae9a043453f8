"""One direction of the mesh: the buffers and task fragments of every rank (algorithm.md, 2 to 5).

Names inside a program: `q`, `k`, `v`, ... are the caller's; `q.0` is Q chunk 0 of the whole Q
group, `out.0`, `lse.0` its partial output; `.wire` what travels, `.in` what arrives, `.all` the
global LSE.
Fragments depend on a rank only through its tile row or column, so they are made once for each and
shared: that keeps plans for thousands of ranks small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.build.chunks import Chunk, in_whole, whole_rows
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.build.reduce import ReduceBy, Reduction, stacks
from mesh_attention.plan.layout import Spans
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Call,
    Merge,
    MergeRule,
    Move,
    Operation,
    Task,
)

ALL_UNITS = "all"
Queries = dict[Kind, Piece]  # the query side of a task, by what is gathered of it
Pair = tuple[Piece, Piece]  # of K and of V, or of their gradients
Pieces = tuple[Piece, ...]
Calls = tuple[Call, ...]
Fresh = tuple[bool, bool]  # accumulators of the queries and of the keys


class TilePass(ABC):
    """What forward and backward share: gathers of Q and KV, and the reductions."""

    direction: Direction
    merge_rule: MergeRule  # of partial results of the Q side
    q_partials: tuple[Kind, ...]  # accumulators of a Q chunk
    kv_partials: tuple[Kind, ...] = ()
    q_reduce_kind: str  # task kinds of the reductions
    kv_reduce_kind: str | None

    def __init__(
        self,
        head_group: HeadGroup,
        tile: Tile,
        chunks: tuple[int, int],
        reduce_by: ReduceBy,
        slices: tuple[int, ...],
        *,
        gather_out: bool,
        per_node: tuple[int, int] = (1, 1),
    ) -> None:
        """`per_node`: members of a Q group and of a KV group that follow each other in a node."""
        self.head_group = head_group
        self.problem = head_group.problem
        self.tile = tile
        self.q_inputs = self.gathered_with_q(gather_out)
        self.slices = slices  # of the heads: their sizes
        self.q_chunks = head_group.chunks(Kind.Q, chunks[0], slices)
        self.kv_chunks = head_group.chunks(Kind.K, chunks[1], slices)
        self.q_per_node, self.kv_per_node = per_node
        self.q_reduce_by = _side(reduce_by, tile.a, per_node[0])
        kv_reduce_by = reduce_by if tile.rotation else ReduceBy.EXCHANGE
        self.kv_reduce_by = _side(kv_reduce_by, tile.b, per_node[1])
        self.own_rows = cache(head_group.rows)
        # Chunks of the same rows and other heads share their rows, and ranks of a row its buffers.
        self._q_rows = cache(self._gathered_q_rows)
        self._kv_rows = cache(self._gathered_kv_rows)
        self.row_buffers = cache(self._row_buffers)
        self.column_buffers = cache(self._column_buffers)

    @property
    def chunks_of_slice(self) -> tuple[int, int]:
        """Q and KV chunks of one slice of the heads."""
        count = len(self.slices)
        return len(self.q_chunks) // count, len(self.kv_chunks) // count

    # What a subclass says.

    @abstractmethod
    def gathered_with_q(self, gather_out: bool) -> tuple[Kind, ...]:
        """What is gathered in the Q group."""

    @abstractmethod
    def attention(
        self, task: Task, queries: Queries, keys: Pair, sums: Pieces, calls: Calls, fresh: Fresh
    ) -> Operation:
        """Of these queries (`q_inputs`) and keys, into `sums`: those of the queries (`q_partials`),
        then those of the keys (`kv_partials`), of which either may hold nothing yet (`fresh`)."""

    @abstractmethod
    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]: ...

    def reduce_kv(self, j: int, reduction: Reduction) -> list[Operation]:
        raise NotImplementedError

    # Groups.

    def groups(self) -> dict[str, tuple[int, ...]]:
        tile, head_group = self.tile, self.head_group
        groups = {}
        if tile.a > 1:
            groups.update({f"Q{r}": tile.q_group(r) for r in range(tile.b)})
        if tile.b > 1 and tile.rotation:
            groups.update({f"KV{c}": tile.kv_group(c) for c in range(tile.a)})
        if tile.b > 1 and not tile.rotation:
            groups[ALL_UNITS] = tuple(range(tile.num_ranks))
        return {
            head_group.group_name(name): head_group.members(units) for name, units in groups.items()
        }

    # A compute task and its operands.

    def compute(self, i: int, j: int, calls: Calls, fresh: Fresh) -> Operation:
        keys, sums = self.keys(j), self.q_sums(i) + self.kv_sums(j)
        return self.attention(Task("C", (i, j)), self.queries(i), keys, sums, calls, fresh)

    def queries(self, i: int) -> Queries:
        return {kind: self.q_piece(kind, i) for kind in self.q_inputs}

    def keys(self, j: int) -> Pair:
        return self.kv_piece("k", j), self.kv_piece("v", j)

    def q_sums(self, i: int) -> Pieces:
        rows = self.tile.a * self.q_chunks[i].size
        return tuple(Piece(f"{kind}.{i}", 0, rows) for kind in self.q_partials)

    def kv_sums(self, j: int) -> Pieces:
        rows = self.tile.b * self.kv_chunks[j].size
        return tuple(Piece(f"{kind}.{j}", 0, rows) for kind in self.kv_partials)

    def q_piece(self, stem: str, i: int) -> Piece:
        chunk = self.q_chunks[i]
        if self.tile.a == 1:
            return chunk.local(self.head_group.local(Kind(stem)))
        return Piece(f"{stem}.{i}", 0, self.tile.a * chunk.size)

    def kv_piece(self, stem: str, j: int) -> Piece:
        chunk = self.kv_chunks[j]
        if self.tile.b == 1:
            return chunk.local(self.head_group.local(Kind(stem)))
        return Piece(f"{stem}.{j}", 0, self.tile.b * chunk.size)

    def wire(self, partial: str) -> str:
        """The buffer in which a partial travels: itself where the precision is the same."""
        same = self.problem.accumulate_bytes == self.problem.element_bytes
        return partial if same else f"{partial}.wire"

    def q_spans(self, row: int, i: int) -> Spans:
        return self._q_rows(row, i % self.chunks_of_slice[0])

    def kv_spans(self, column: int, j: int) -> Spans:
        return self._kv_rows(column, j % self.chunks_of_slice[1])

    def _gathered_q_rows(self, row: int, i: int) -> Spans:
        units = [self.own_rows(Kind.Q, unit) for unit in self.tile.q_group(row)]
        return whole_rows(units, self.q_chunks[i])

    def _gathered_kv_rows(self, column: int, j: int) -> Spans:
        units = [self.own_rows(Kind.K, unit) for unit in self.tile.kv_partitions(column)]
        return whole_rows(units, self.kv_chunks[j])

    def kv_rows_of(self, units: tuple[int, ...]) -> Spans:
        """KV of these units as a gather lays it out, not chunked."""
        return whole_rows([self.own_rows(Kind.K, unit) for unit in units], self.kv_chunks[0])

    # Communication fragments.

    def gather_q(self, row: int, i: int) -> AllGather:
        moves = self.moves(self.q_chunks[i], self.queries(i))
        return AllGather(Task("AG-Q", (i,)), self.head_group.group_name(f"Q{row}"), moves)

    def moves(self, chunk: Chunk, wholes: Queries) -> tuple[Move, ...]:
        return tuple(
            Move(chunk.local(self.head_group.local(kind)), whole, chunk.cuts)
            for kind, whole in wholes.items()
        )

    def fetch_kv(self, unit: int, j: int) -> AllGather | AllToAll:
        """Cached by tile column with rotation (any unit of it will do), else by unit."""
        chunk = self.kv_chunks[j]
        task = Task("AG-KV", (j,))
        if self.tile.rotation:
            moves = self.moves(chunk, dict(zip((Kind.K, Kind.V), self.keys(j), strict=True)))
            return AllGather(task, self.head_group.group_name(f"KV{self.tile.column(unit)}"), moves)
        reduction = self.kv_reduction(unit, j)
        assert reduction.owner_slots is not None
        assert reduction.user_slots is not None
        sends: list[tuple[Piece, ...]] = [()] * reduction.group_size
        receives: list[tuple[Piece, ...]] = [()] * reduction.group_size
        for user in reduction.user_slots:
            sends[user] = tuple(
                piece
                for kind in (Kind.K, Kind.V)
                for piece in chunk.local_stretches(self.head_group.local(kind))
            )
        for index, owner in enumerate(reduction.owner_slots):
            receives[owner] = tuple(
                piece
                for kind in (Kind.K, Kind.V)
                for piece in in_whole(f"{kind}.{j}", index, self.tile.b, chunk)
            )
        return AllToAll(task, reduction.group, tuple(sends), tuple(receives))

    def fetch_key(self, unit: int) -> int:
        """Units with the same key share the fragments of their KV side."""
        return self.tile.column(unit) if self.tile.rotation else unit

    def q_reduction(self, unit: int, i: int) -> Reduction:
        tile, row = self.tile, self.tile.row(unit)
        group = self.head_group.group_name(f"Q{row}")
        reduction = Reduction(self.q_reduce_by, group, tile.a, self.q_chunks[i], num_owners=tile.a)
        return reduction.of_member(tile.q_group(row).index(unit), self.q_per_node)

    def kv_reduction(self, unit: int, j: int) -> Reduction:
        tile, chunk = self.tile, self.kv_chunks[j]
        if tile.rotation or tile.b == 1:
            column = tile.column(unit)
            group = self.head_group.group_name(f"KV{column}")
            reduction = Reduction(self.kv_reduce_by, group, tile.b, chunk, num_owners=tile.b)
            return reduction.of_member(tile.kv_group(column).index(unit), self.kv_per_node)
        return Reduction(
            ReduceBy.EXCHANGE,
            self.head_group.group_name(ALL_UNITS),
            tile.num_ranks,
            chunk,
            num_owners=tile.b,
            owner_slots=tile.kv_partitions(tile.column(unit)),
            user_slots=tile.kv_users(unit),
        )

    def empty_q(self, i: int) -> Operation:
        """Neutral partials of a Q chunk of which this rank computes nothing."""
        task = Task(self.q_reduce_kind, (i,), "empty")
        return Merge(task, self.merge_rule, (), self.q_sums(i))

    def empty_kv(self, j: int) -> list[Operation]:
        assert self.kv_reduce_kind is not None
        task = Task(self.kv_reduce_kind, (j,), "empty")
        return [Merge(task, MergeRule.SUM, (), (total,)) for total in self.kv_sums(j)]

    # Buffers.

    def precision_of(self, kind: Kind) -> Precision:
        return Precision.ACCUMULATE if kind.is_statistic else Precision.ELEMENT

    def _row_buffers(self, row: int) -> dict[str, Buffer]:
        """Buffers that all ranks of a tile row hold alike."""
        made: dict[str, Buffer] = {}
        for chunk in self.q_chunks:
            rows = self.q_spans(row, chunk.index)
            for kind in self.q_inputs if self.tile.a > 1 else ():
                self._add(made, f"{kind}.{chunk.index}", kind, rows, chunk)
            for kind in self.q_partials:
                self._add_partial(made, f"{kind}.{chunk.index}", kind, rows, chunk)
                if self.q_reduce_by is ReduceBy.REDUCE_SCATTER and kind is Kind.LSE:
                    self._add(made, f"{kind}.{chunk.index}.all", kind, rows, chunk)
        return made

    def _column_buffers(self, column: int) -> dict[str, Buffer]:
        made: dict[str, Buffer] = {}
        for chunk in self.kv_chunks:
            rows = self.kv_spans(column, chunk.index)
            for kind in (Kind.K, Kind.V) if self.tile.b > 1 else ():
                self._add(made, f"{kind}.{chunk.index}", kind, rows, chunk)
            for kind in self.kv_partials:
                self._add_partial(made, f"{kind}.{chunk.index}", kind, rows, chunk)
        return made

    def stack_buffers(self, unit: int) -> dict[str, Buffer]:
        """Where other units' partials of this unit's own chunks arrive."""
        made: dict[str, Buffer] = {}
        own_q, own_kv = (self.own_rows(kind, unit) for kind in (Kind.Q, Kind.K))
        tile = self.tile
        q_owners, kv_owners = (
            [self.own_rows(kind, member) for member in members]
            for kind, members in (
                (Kind.Q, tile.q_group(tile.row(unit))),
                (Kind.K, tile.kv_group(tile.column(unit)) if tile.rotation else ()),
            )
        )
        for chunk in self.q_chunks:
            for kind in self.q_partials if self.q_reduce_by is not ReduceBy.LOCAL else ():
                if self.q_reduce_by is not ReduceBy.REDUCE_SCATTER or kind is Kind.LSE:
                    name = f"{kind}.{chunk.index}"
                    name = name if kind is Kind.LSE else self.wire(name)
                    reduction = self.q_reduction(unit, chunk.index)
                    for stack, rows in stacks(reduction, name, q_owners, own_q).items():
                        self._add(made, stack, kind, rows, chunk)
        summed = self.kv_reduce_by in (ReduceBy.EXCHANGE, ReduceBy.NODES)
        for chunk in self.kv_chunks if summed else ():
            reduction = self.kv_reduction(unit, chunk.index)
            for kind in self.kv_partials:
                name = self.wire(f"{kind}.{chunk.index}")
                for stack, rows in stacks(reduction, name, kv_owners, own_kv).items():
                    self._add(made, stack, kind, rows, chunk)
        return made

    def _add_partial(
        self, made: dict[str, Buffer], name: str, kind: Kind, rows: Spans, chunk: Chunk
    ) -> None:
        heads, wire = self._heads(kind, chunk), self.wire(name)
        travels_itself = wire == name and not kind.is_statistic
        precision = Precision.ELEMENT if travels_itself else Precision.ACCUMULATE
        made[name] = Buffer(name, kind, rows, heads, precision)
        if wire != name and not kind.is_statistic:
            made[wire] = Buffer(wire, kind, rows, heads, Precision.ELEMENT)

    def _add(
        self, made: dict[str, Buffer], name: str, kind: Kind, rows: Spans, chunk: Chunk
    ) -> None:
        made[name] = Buffer(name, kind, rows, self._heads(kind, chunk), self.precision_of(kind))

    def _heads(self, kind: Kind, chunk: Chunk) -> tuple[int, int]:
        first, last = self.head_group.heads(kind)
        if chunk.heads is None:
            return first, last
        return first + chunk.heads[0], first + chunk.heads[1]


def _side(by: ReduceBy, size: int, per_node: int) -> ReduceBy:
    """Of a group: nodes that hold all of it, or one of it each, leave nothing to combine first."""
    if size == 1:
        return ReduceBy.LOCAL
    return ReduceBy.EXCHANGE if by is ReduceBy.NODES and per_node in (1, size) else by
