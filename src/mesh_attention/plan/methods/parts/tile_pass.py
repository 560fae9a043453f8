"""One direction of the mesh: the buffers and task fragments of every rank (algorithm.md, 2 to 5).

Names inside a program: `q`, `k`, `v`, ... are the caller's; `q.0` is Q chunk 0 of the whole Q
group, `out.0`, `lse.0` its partial output; `.wire` what travels, `.in` what arrives, `.all` the
global LSE.
Fragments depend on a rank only through its tile row or column, so they are made once for each and
shared: that keeps plans for thousands of ranks small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Call,
    MergeRule,
    Move,
    Operation,
    Task,
)
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.chunks import Chunk, in_whole
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.reduce import ReduceBy, Reduction, by_member
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS, TileSide

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
        self.slices = slices  # of the heads: their sizes
        self.fragments: dict[tuple[Task, int], list[Operation]] = {}  # those made so far
        self.q = TileSide(
            *(head_group, "Q", Kind.Q, tile.a, tile.row, tile.q_group, tile.q_group, None),
            inputs=self.gathered_with_q(gather_out),
            partials=self.q_partials,
            merge_rule=self.merge_rule,
            count=chunks[0],
            slices=slices,
            wanted=reduce_by,
            per_node=per_node[0],
        )
        users = None if tile.rotation or tile.b == 1 else tile.kv_users
        self.kv = TileSide(
            *(head_group, "KV", Kind.K, tile.b, tile.column, tile.kv_group, tile.kv_partitions),
            users=users,
            inputs=(Kind.K, Kind.V),
            partials=self.kv_partials,
            merge_rule=MergeRule.SUM,
            count=chunks[1],
            slices=slices,
            wanted=reduce_by,
            per_node=per_node[1],
        )

    @property
    def needs(self) -> tuple[Kind, ...]:
        """The tensors that it reads."""
        return (*self.q.inputs, *self.kv.inputs)

    @property
    def cut_setting(self) -> dict[str, str]:
        """How it is cut, for people."""
        short = self.head_group.has_short_start
        keys = self.kv.chunks_of_slice - short  # as they were asked for
        setting = {"chunks": f"{self.q.chunks_of_slice}x{keys}"}
        if len(self.slices) > 1:
            setting["head_slices"] = "+".join(map(str, self.slices))
        if self.head_group.has_even_chunks:
            setting["even_chunks"] = "on"
        if short:
            setting["short_start"] = "on"
        return setting

    # What a subclass says.

    @abstractmethod
    def gathered_with_q(self, gather_out: bool) -> tuple[Kind, ...]:
        """What is gathered in the Q group."""

    @abstractmethod
    def attention(
        self, task: Task, queries: Queries, keys: Pair, sums: Pieces, calls: Calls, fresh: Fresh
    ) -> Operation:
        """Of these queries (`q.inputs`) and keys, into `sums`: those of the queries (`q_partials`),
        then those of the keys (`kv_partials`), of which either may hold nothing yet (`fresh`)."""

    @abstractmethod
    def reduce_q(self, i: int, reduction: Reduction) -> list[Operation]: ...

    def reduce_kv(self, j: int, reduction: Reduction) -> list[Operation]:
        raise NotImplementedError

    # Groups.

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Of units, by names that all head groups have alike."""
        tile, groups = self.tile, dict[str, tuple[int, ...]]()
        if tile.a > 1:
            groups.update({f"Q{r}": tile.q_group(r) for r in range(tile.b)})
        if tile.b > 1 and tile.rotation:
            groups.update({f"KV{c}": tile.kv_group(c) for c in range(tile.a)})
        if tile.b > 1 and not tile.rotation:
            groups[ALL_UNITS] = tuple(range(tile.num_ranks))
        return groups

    # A compute task and its operands.

    def compute(self, i: int, j: int, calls: Calls, fresh: Fresh) -> Operation:
        sums = self.q.sums(i) + self.kv.sums(j)
        return self.attention(Task("C", (i, j)), self.queries(i), self.keys(j), sums, calls, fresh)

    def queries(self, i: int) -> Queries:
        return {kind: self.q.piece(kind, i) for kind in self.q.inputs}

    def keys(self, j: int) -> Pair:
        return self.kv.piece(Kind.K, j), self.kv.piece(Kind.V, j)

    # Communication fragments.

    def gather_q(self, row: int, i: int) -> AllGather:
        moves = self.moves(self.q.chunks[i], self.queries(i))
        return AllGather(Task("AG-Q", (i,)), self.q.group(row), moves)

    def moves(self, chunk: Chunk, wholes: Queries) -> tuple[Move, ...]:
        return tuple(
            Move(chunk.local(self.head_group.local(kind)), whole, chunk.cuts)
            for kind, whole in wholes.items()
        )

    def fetch_kv(self, unit: int, j: int) -> AllGather | AllToAll:
        """Cached by tile column with rotation (any unit of it will do), else by unit."""
        chunk = self.kv.chunks[j]
        task = Task("AG-KV", (j,))
        if self.tile.rotation:
            moves = self.moves(chunk, dict(zip((Kind.K, Kind.V), self.keys(j), strict=True)))
            return AllGather(task, self.kv.group(self.tile.column(unit)), moves)
        reduction = self.kv.reduction(unit, j)
        assert reduction.owner_slots is not None
        assert reduction.user_slots is not None
        given = tuple(
            piece
            for kind in (Kind.K, Kind.V)
            for piece in chunk.local_stretches(self.head_group.local(kind))
        )
        sends = by_member(reduction.group_size, dict.fromkeys(reduction.user_slots, given))
        taken = {
            owner: tuple(
                piece
                for kind in (Kind.K, Kind.V)
                for piece in in_whole(f"{kind}.{j}", index, self.tile.b, chunk)
            )
            for index, owner in enumerate(reduction.owner_slots)
        }
        receives = by_member(reduction.group_size, taken)
        return AllToAll(task, reduction.group, sends, receives)

    def fetch_key(self, unit: int) -> int:
        """Units with the same key share the fragments of their KV side."""
        return self.tile.column(unit) if self.tile.rotation else unit

    def stack_buffers(self, unit: int) -> dict[str, Buffer]:
        return {**self.q.stack_buffers(unit), **self.kv.stack_buffers(unit)}
