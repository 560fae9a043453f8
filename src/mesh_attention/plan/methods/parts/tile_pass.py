"""One direction of a tile on one head group: its gathers, attentions and reductions.

Forward: gather Q and KV, attend, reduce partial outputs. Backward: gather Q, dO and statistics, and
KV; reduce gradients (algorithm.md, 2 to 5).

Names inside a program: `q`, `k`, `v`, ... are the caller's; `q.0` is Q chunk 0 of the whole Q
group, `out.0`, `lse.0` its partial output; `.wire` the copy that is sent, `.in` the partials that
arrive, `.all` the global LSE.

Operations depend on a unit only through its tile row or column, so they are made once for each and
shared: that keeps plans for thousands of ranks small. Used by the box, by StarTrail, and by the
rings and orders that these are made of.
"""

from __future__ import annotations

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    Communication,
    Move,
    Operation,
    Task,
)
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.chunks import Chunk, in_whole
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.reduce import ReduceBy, by_member, reduce_output, reduce_sum
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS, TileSide, kinds_of_sides

COMPUTE, GATHER_Q, GATHER_KV = "C", "AG-Q", "AG-KV"  # kinds of tasks
Queries = dict[Kind, Piece]  # the query side of a task, by what is gathered of it
Pair = tuple[Piece, Piece]  # of K and of V, or of their gradients
Pieces = tuple[Piece, ...]
Calls = tuple[Call, ...]
Fresh = tuple[bool, bool]  # whether accumulators of queries, and of keys, hold nothing yet


def attention(
    task: Task, queries: Queries, keys: Pair, sums: Pieces, calls: Calls, fresh: Fresh
) -> Operation:
    """The attention of these queries and keys into `sums`: partial results of the queries, then of
    the keys. It is a backward one if dO is among the queries."""
    if Kind.GRAD_OUT not in queries:
        out, lse = sums
        return Attend(task, queries[Kind.Q], *keys, out, lse, calls, fresh[0])
    grad_q, grad_k, grad_v = sums
    q, grad_out, lse = (queries[kind] for kind in (Kind.Q, Kind.GRAD_OUT, Kind.LSE))
    inputs = (q, *keys, grad_out, lse, queries.get(Kind.OUT), queries.get(Kind.DELTA))
    return AttendBackward(task, *inputs, grad_q, grad_k, grad_v, calls, *fresh)


class TilePass:
    def __init__(
        self,
        head_group: HeadGroup,
        direction: Direction,
        tile: Tile,
        cut: PassCut,
        reduce_by: ReduceBy,
        *,
        gather_out: bool,
        per_node: tuple[int, int],
        keeps_gathered: tuple[bool, bool] = (False, False),
    ) -> None:
        """`per_node`: members of a Q group and of a KV group that follow each other in a node;
        `keeps_gathered`: whether what they gather stays for the backward pass."""
        self.head_group = head_group
        self.direction = direction
        self.problem = head_group.problem
        self.tile = tile
        self.slices = cut.slices  # of the heads: their sizes
        forward = direction is Direction.FORWARD
        self.q_reduce_kind = "RS-Q" if forward else "RS-dQ"  # kinds of tasks
        self.kv_reduce_kind = None if forward else "RS-dKV"
        q, kv = kinds_of_sides(direction, gather_out=gather_out)
        kept = Role.KEPT if forward else Role.RECALLED
        self.q, self.kv = (
            TileSide(
                head_group,
                tile,
                (q, kv)[keys],
                cut,
                reduce_by,
                per_node[keys],
                keys=keys,
                gathered_as=kept if keeps_gathered[keys] else Role.WORKSPACE,
            )
            for keys in (False, True)
        )
        self.keeps_gathered = any(keeps_gathered)
        self.merge_rule = self.q.merge_rule
        self.needs = (*self.q.gathered, *self.kv.gathered)  # of which it reads a unit's own rows
        self._parts: dict[tuple[Task, int], list[list[Operation]]] = {}
        # Of compute tasks: all units have the same.
        self._operands: dict[tuple[int, int], tuple[Task, Queries, Pair, Pieces]] = {}

    @property
    def cut_setting(self) -> dict[str, str]:
        """How it is cut, for people."""
        cut, (q_slots, kv_slots) = self.head_group.cut, map(self.head_group.slots, (Kind.Q, Kind.K))
        short = cut is not None and len(kv_slots) > cut.chunks[1]
        keys = self.kv.chunks_of_slice - short  # as they were asked for
        setting = {"chunks": f"{self.q.chunks_of_slice}x{keys}"}
        if len(self.slices) > 1:
            setting["head_slices"] = "+".join(map(str, self.slices))
        if any(len(spans) > 1 for spans in q_slots + kv_slots):  # of both halves of a zigzag
            setting["even_chunks"] = "on"
        if short:
            setting["short_start"] = "on"
        return setting

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Groups of units, by names that all head groups have alike."""
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
        operands = self._operands.get((i, j))
        if operands is None:
            sums, task = self.q.sums(i) + self.kv.sums(j), Task(COMPUTE, (i, j))
            operands = self._operands[i, j] = task, self.queries(i), self.keys(j), sums
        return attention(*operands, calls, fresh)

    def queries(self, i: int) -> Queries:
        return {kind: self.q.piece(kind, i) for kind in self.q.inputs}

    def keys(self, j: int) -> Pair:
        return self.kv.piece(Kind.K, j), self.kv.piece(Kind.V, j)

    # Communication tasks.

    def parts(self, unit: int, task: Task) -> list[list[Operation]]:
        """Operations of a communication task on one unit, in parts that each end with a transfer;
        the last part is what follows the last transfer. Units with equal operations share them."""
        key = task, self._sharing(unit, task)
        if key not in self._parts:
            self._parts[key] = _up_to_transfers(self._communication(unit, task))
        return self._parts[key]

    def _sharing(self, unit: int, task: Task) -> int:
        """Units with the same number have the same operations for a task."""
        reduced = {self.q_reduce_kind: self.q, self.kv_reduce_kind: self.kv}.get(task.kind)
        if reduced is not None and reduced.reduce_by is ReduceBy.NODES:
            return unit
        if task.kind == GATHER_Q or reduced is self.q:
            return self.tile.row(unit)
        return self.tile.column(unit) if self.tile.rotation else unit

    def _communication(self, unit: int, task: Task) -> list[Operation]:
        (index,) = task.index
        if task.kind == GATHER_Q:
            return [self.gather_q(self.tile.row(unit), index)] if self.tile.a > 1 else []
        if task.kind == GATHER_KV:
            return [self._gather_kv(unit, index)] if self.tile.b > 1 and self.kv.gathered else []
        if task.kind == self.q_reduce_kind:
            return self.reduce_q(unit, index)
        assert task.kind == self.kv_reduce_kind
        tensors = self._tensors(self.kv, index)
        return reduce_sum(task, self.kv.reduction(unit, index), tensors)

    def gather_q(self, row: int, i: int) -> AllGather:
        queries = self.queries(i)
        moves = self.moves(self.q.chunks[i], {kind: queries[kind] for kind in self.q.gathered})
        return AllGather(Task(GATHER_Q, (i,)), self.q.group(row), moves)

    def moves(self, chunk: Chunk, wholes: Queries) -> tuple[Move, ...]:
        return tuple(
            Move(chunk.local(self.head_group.local(kind)), whole, chunk.cuts)
            for kind, whole in wholes.items()
        )

    def _gather_kv(self, unit: int, j: int) -> AllGather | AllToAll:
        chunk, task = self.kv.chunks[j], Task(GATHER_KV, (j,))
        if self.tile.rotation:
            moves = self.moves(chunk, dict(zip((Kind.K, Kind.V), self.keys(j), strict=True)))
            return AllGather(task, self.kv.group(self.tile.column(unit)), moves)
        reduction = self.kv.reduction(unit, j)
        assert reduction.owner_slots is not None
        assert reduction.user_slots is not None
        own = tuple(
            piece
            for kind in (Kind.K, Kind.V)
            for piece in chunk.local_parts(self.head_group.local(kind))
        )
        sends = by_member(reduction.group_size, dict.fromkeys(reduction.user_slots, own))
        taken = {
            owner: tuple(
                piece
                for kind in (Kind.K, Kind.V)
                for piece in in_whole(f"{kind}.{j}", index, self.tile.b, chunk)
            )
            for index, owner in enumerate(reduction.owner_slots)
        }
        return AllToAll(task, reduction.group, sends, by_member(reduction.group_size, taken))

    def reduce_q(self, unit: int, i: int) -> list[Operation]:
        task, reduction = Task(self.q_reduce_kind, (i,)), self.q.reduction(unit, i)
        if self.direction is Direction.BACKWARD:
            return reduce_sum(task, reduction, self._tensors(self.q, i))
        partial = (f"out.{i}", f"lse.{i}")
        wire = self.q.wire(partial[0])
        out, lse = map(self.head_group.local, (Kind.OUT, Kind.LSE))
        return reduce_output(task, reduction, partial=partial, wire=wire, out=out, lse=lse)

    def _tensors(self, side: TileSide, index: int) -> tuple[tuple[str, str, str], ...]:
        """Of each gradient: its accumulator, the buffer that is sent, and the result."""
        names = [(f"{kind}.{index}", self.head_group.local(kind)) for kind in side.partials]
        return tuple((name, side.wire(name), result) for name, result in names)

    def stack_buffers(self, unit: int) -> dict[str, Buffer]:
        return {**self.q.stack_buffers(unit), **self.kv.stack_buffers(unit)}


def _up_to_transfers(operations: list[Operation]) -> list[list[Operation]]:
    parts: list[list[Operation]] = [[]]
    for op in operations:
        if parts[-1] and isinstance(parts[-1][-1], Communication):
            parts.append([])
        parts[-1].append(op)
    return parts
