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
from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.chunks import chunks_of, in_whole, stack_spans, whole_spans
from mesh_attention.plan.home import Home, Route
from mesh_attention.plan.layout import Layout, Spans
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import AllGather, AllToAll, Call, Merge, MergeRule, Move, Operation

__all__ = ["MeshPass"]

EVERYONE = "all"


class MeshPass(ABC):
    """What forward and backward share: gathers of Q and KV, and the ways home."""

    direction: Direction
    inputs: tuple[Kind, ...]
    q_inputs: tuple[Kind, ...]  # what is gathered in the Q group
    outputs: tuple[Kind, ...]
    q_return: str  # task kinds of the ways home
    kv_return: str | None

    def __init__(
        self,
        problem: Problem,
        q_layout: Layout,
        kv_layout: Layout,
        tile: Tile,
        chunks: tuple[int, int],
        route: Route,
    ) -> None:
        self.problem = problem
        self.q_layout = q_layout
        self.kv_layout = kv_layout
        self.tile = tile
        self.q_chunks = chunks_of(q_layout, chunks[0])
        self.kv_chunks = chunks_of(kv_layout, chunks[1])
        self.q_route = route if tile.a > 1 else Route.LOCAL
        kv_route = route if tile.rotation else Route.EXCHANGE
        self.kv_route = kv_route if tile.b > 1 else Route.LOCAL
        self.q_slots = q_layout.slots
        self.kv_slots = kv_layout.slots
        self.q_piece = cache(self._q_piece)
        self.kv_piece = cache(self._kv_piece)
        self.q_partial = cache(self._q_partial)
        self.kv_partial = cache(self._kv_partial)
        self.fetch_kv = cache(self._fetch_kv)
        self.gather_q = cache(self._gather_q)
        self.q_home = cache(self._q_home)
        self.kv_home = cache(self._kv_home)
        self.q_spans = cache(self._q_spans)
        self.kv_spans = cache(self._kv_spans)
        self.row_buffers = cache(self._row_buffers)
        self.column_buffers = cache(self._column_buffers)

    # What a subclass says.

    @abstractmethod
    def q_partials(self) -> tuple[tuple[str, Kind], ...]:
        """Accumulators of a Q chunk: (stem, kind)."""

    @abstractmethod
    def kv_partials(self) -> tuple[tuple[str, Kind], ...]: ...

    @abstractmethod
    def prologue(self) -> tuple[Operation, ...]: ...

    @abstractmethod
    def compute(
        self, i: int, j: int, calls: tuple[Call, ...], fresh_q: bool, fresh_kv: bool
    ) -> Operation: ...

    @abstractmethod
    def return_q(self, i: int, home: Home) -> list[Operation]: ...

    def return_kv(self, j: int, home: Home) -> list[Operation]:
        raise NotImplementedError

    # Groups.

    def groups(self) -> dict[str, tuple[int, ...]]:
        tile = self.tile
        groups = {}
        if tile.a > 1:
            groups.update({f"Q{r}": tile.q_group(r) for r in range(tile.b)})
        if tile.b > 1 and tile.rotation:
            groups.update({f"KV{c}": tile.kv_group(c) for c in range(tile.a)})
        if tile.b > 1 and not tile.rotation:
            groups[EVERYONE] = tuple(range(tile.num_ranks))
        return groups

    # Operands of a compute task.

    def _q_piece(self, stem: str, i: int) -> Piece:
        chunk = self.q_chunks[i]
        if self.tile.a == 1:
            return chunk.local(stem)
        return Piece(f"{stem}.{i}", 0, self.tile.a * chunk.size)

    def _kv_piece(self, stem: str, j: int) -> Piece:
        chunk = self.kv_chunks[j]
        if self.tile.b == 1:
            return chunk.local(stem)
        return Piece(f"{stem}.{j}", 0, self.tile.b * chunk.size)

    def _q_partial(self, stem: str, i: int) -> Piece:
        return Piece(f"{stem}.{i}", 0, self.tile.a * self.q_chunks[i].size)

    def _kv_partial(self, stem: str, j: int) -> Piece:
        return Piece(f"{stem}.{j}", 0, self.tile.b * self.kv_chunks[j].size)

    def wire(self, partial: str) -> str:
        """The buffer in which a partial travels: itself where the precision is the same."""
        same = self.problem.accumulate_bytes == self.problem.element_bytes
        return partial if same else f"{partial}.wire"

    def _q_spans(self, row: int, i: int) -> Spans:
        return whole_spans(self.tile.q_group(row), self.q_chunks[i], self.q_slots)

    def _kv_spans(self, column: int, j: int) -> Spans:
        partitions = self.tile.kv_partitions(column)
        return whole_spans(partitions, self.kv_chunks[j], self.kv_slots)

    # Communication fragments.

    def _gather_q(self, row: int, i: int) -> AllGather:
        chunk = self.q_chunks[i]
        moves = tuple(
            Move(chunk.local(kind), self.q_piece(kind, i), chunk.cuts) for kind in self.q_inputs
        )
        return AllGather(f"AG-Q-{i}", f"Q{row}", moves)

    def _fetch_kv(self, rank: int, j: int) -> AllGather | AllToAll:
        """Cached by tile column with rotation (any rank of it will do), else by rank."""
        chunk = self.kv_chunks[j]
        name = f"AG-KV-{j}"
        if self.tile.rotation:
            moves = tuple(
                Move(chunk.local(kind), self.kv_piece(kind, j), chunk.cuts)
                for kind in (Kind.K, Kind.V)
            )
            return AllGather(name, f"KV{self.tile.column(rank)}", moves)
        home = self.kv_home(rank, j)
        assert home.owner_slots is not None
        assert home.user_slots is not None
        sends: list[tuple[Piece, ...]] = [()] * home.group_size
        receives: list[tuple[Piece, ...]] = [()] * home.group_size
        for user in home.user_slots:
            sends[user] = chunk.local_stretches("k") + chunk.local_stretches("v")
        for index, owner in enumerate(home.owner_slots):
            receives[owner] = tuple(
                piece
                for kind in (Kind.K, Kind.V)
                for piece in in_whole(f"{kind}.{j}", index, self.tile.b, chunk)
            )
        return AllToAll(name, EVERYONE, tuple(sends), tuple(receives))

    def fetch_key(self, rank: int) -> int:
        """Ranks with the same key share the fragments of their KV side."""
        return self.tile.column(rank) if self.tile.rotation else rank

    def _q_home(self, row: int, i: int) -> Home:
        a = self.tile.a
        return Home(self.q_route, f"Q{row}", a, self.q_chunks[i], num_owners=a)

    def _kv_home(self, rank: int, j: int) -> Home:
        tile, chunk = self.tile, self.kv_chunks[j]
        if tile.rotation or tile.b == 1:
            return Home(self.kv_route, f"KV{tile.column(rank)}", tile.b, chunk, num_owners=tile.b)
        return Home(
            Route.EXCHANGE,
            EVERYONE,
            tile.num_ranks,
            chunk,
            num_owners=tile.b,
            owner_slots=tile.kv_partitions(tile.column(rank)),
            user_slots=tile.kv_users(rank),
        )

    def empty_q(self, i: int) -> Operation:
        """Neutral partials of a Q chunk of which this rank computes nothing."""
        pieces = tuple(self.q_partial(stem, i) for stem, _ in self.q_partials())
        rule = MergeRule.SOFTMAX if self.direction is Direction.FORWARD else MergeRule.SUM
        return Merge(f"{self.q_return}-{i}.empty", rule, (), pieces)

    def empty_kv(self, j: int) -> list[Operation]:
        return [
            Merge(f"{self.kv_return}-{j}.empty", MergeRule.SUM, (), (self.kv_partial(stem, j),))
            for stem, _ in self.kv_partials()
        ]

    # Buffers.

    def heads_of(self, kind: Kind) -> tuple[int, int]:
        return (0, self.problem.kv_heads if kind.is_key_side else self.problem.num_heads)

    def precision_of(self, kind: Kind) -> Precision:
        return Precision.ACCUMULATE if kind.is_statistic else Precision.ELEMENT

    def local_buffers(self, rank: int) -> dict[str, Buffer]:
        buffers = {}
        for kind in (*self.inputs, *self.outputs):
            slots = self.kv_slots if kind.is_key_side else self.q_slots
            rows = ((rank * slots, (rank + 1) * slots),)
            role = Role.OUTPUT if kind in self.outputs else Role.INPUT
            buffers[kind.value] = Buffer(
                kind.value, kind, rows, self.heads_of(kind), self.precision_of(kind), role
            )
        return buffers

    def _row_buffers(self, row: int) -> dict[str, Buffer]:
        """Buffers that all ranks of a tile row hold alike."""
        made: dict[str, Buffer] = {}
        for chunk in self.q_chunks:
            rows = self._q_spans(row, chunk.index)
            for kind in self.q_inputs if self.tile.a > 1 else ():
                self._add(made, f"{kind}.{chunk.index}", kind, rows)
            for stem, kind in self.q_partials():
                self._add_partial(made, f"{stem}.{chunk.index}", kind, rows)
                if self.q_route is Route.REDUCE_SCATTER and kind is Kind.LSE:
                    self._add(made, f"{stem}.{chunk.index}.all", kind, rows)
        return made

    def _column_buffers(self, column: int) -> dict[str, Buffer]:
        made: dict[str, Buffer] = {}
        for chunk in self.kv_chunks:
            rows = self._kv_spans(column, chunk.index)
            for kind in (Kind.K, Kind.V) if self.tile.b > 1 else ():
                self._add(made, f"{kind}.{chunk.index}", kind, rows)
            for stem, kind in self.kv_partials():
                self._add_partial(made, f"{stem}.{chunk.index}", kind, rows)
        return made

    def stack_buffers(self, rank: int) -> dict[str, Buffer]:
        """Where other ranks' partials of this rank's own chunks arrive."""
        made: dict[str, Buffer] = {}
        for chunk in self.q_chunks:
            for stem, kind in self.q_partials() if self.q_route is not Route.LOCAL else ():
                if self.q_route is Route.EXCHANGE or kind is Kind.LSE:
                    name = f"{stem}.{chunk.index}"
                    name = name if kind is Kind.LSE else self.wire(name)
                    rows = stack_spans(rank, self.tile.a, chunk, self.q_slots)
                    self._add(made, f"{name}.in", kind, rows)
        for chunk in self.kv_chunks if self.kv_route is Route.EXCHANGE else ():
            copies = self.kv_home(self.fetch_key(rank), chunk.index).num_copies
            for stem, kind in self.kv_partials():
                rows = stack_spans(rank, copies, chunk, self.kv_slots)
                self._add(made, f"{self.wire(f'{stem}.{chunk.index}')}.in", kind, rows)
        return made

    def _add_partial(self, made: dict[str, Buffer], name: str, kind: Kind, rows: Spans) -> None:
        heads, wire = self.heads_of(kind), self.wire(name)
        travels_itself = wire == name and not kind.is_statistic
        precision = Precision.ELEMENT if travels_itself else Precision.ACCUMULATE
        made[name] = Buffer(name, kind, rows, heads, precision)
        if wire != name and not kind.is_statistic:
            made[wire] = Buffer(wire, kind, rows, heads, Precision.ELEMENT)

    def _add(self, made: dict[str, Buffer], name: str, kind: Kind, rows: Spans) -> None:
        made[name] = Buffer(name, kind, rows, self.heads_of(kind), self.precision_of(kind))
