"""One direction of a tile on one head group: its two sides, and the attentions between them.

Forward: gather Q and KV, attend, reduce partial outputs. Backward: gather Q, dO and statistics, and
KV; reduce gradients (algorithm.md, 2 to 5). `TileSide` makes the transfers of each side. Operations
depend on a unit only through its tile row or column, so they are made once for each and shared:
that keeps plans for thousands of ranks small. The box and StarTrail use it, with the rings and
orders that these are made of, and call it `tiles`.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from weakref import proxy

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Call,
    Communication,
    Operation,
    Task,
)
from mesh_attention.plan.methods.parts.tile_side import TileSide, Tiling

COMPUTE = "C"  # the kind of task of an attention
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
    """`q` and `kv` are its sides; `parts` are the operations of a task that gathers or reduces, and
    `attend` is that of a task in between."""

    def __init__(self, tiling: Tiling) -> None:
        self.head_group, self.direction = tiling.head_group, tiling.direction
        self.problem, self.tile = self.head_group.problem, tiling.tile
        self.slices = tiling.cut.slices  # of the heads: their sizes
        self.q, self.kv = (TileSide(tiling, keys=keys) for keys in (False, True))
        # Of the tasks that gather and reduce, by their kind.
        self.side_of = {
            kind: side
            for side in (self.q, self.kv)
            for kind in (side.gather_kind, side.reduce_kind)
        }
        self.keeps_gathered = self.q.keeps_gathered or self.kv.keeps_gathered
        self.needs = (*self.q.gathered, *self.kv.gathered)  # of which it reads a unit's own rows
        self._parts: dict[tuple[Task, int], list[list[Operation]]] = {}
        # Of compute tasks: all units have the same.
        self._operands: dict[Task, tuple[Queries, Pair, Pieces]] = {}
        # A rank that runs asks for its own buffers, again for every mask.
        self.buffers = lru_cache(maxsize=2)(partial(TilePass._buffers, proxy(self)))

    @property
    def cut_setting(self) -> dict[str, str]:
        """How it is cut, for people."""
        cut, q_slots, kv_slots = self.head_group.cut, self.q.own.slots, self.kv.own.slots
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

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Groups of units, by names that all head groups have alike."""
        return self.q.groups(self.tile.b) | self.kv.groups(self.tile.a)

    def attend(self, task: Task, calls: Calls, fresh: Fresh) -> Operation:
        """A chunk of queries against one of keys."""
        operands = self._operands.get(task)
        if operands is None:
            (i, j), sums = task.index, self.q.sums(task.index[0]) + self.kv.sums(task.index[1])
            operands = self._operands[task] = self.q.pieces(i), self.keys(j), sums
        return attention(task, *operands, calls, fresh)

    def keys(self, j: int) -> Pair:
        return self.kv.piece(Kind.K, j), self.kv.piece(Kind.V, j)

    def parts(self, unit: int, task: Task) -> list[list[Operation]]:
        """Operations of a communication task on one unit, in parts that each end with a transfer;
        the last part is what follows the last transfer. Units with equal operations share them."""
        side = self.side_of[task.kind]
        key = task, side.shared_by(task, unit)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = [[]]
            transfers = side.gather if task.kind == side.gather_kind else side.reduce
            for op in transfers(unit, *task.index):
                if parts[-1] and isinstance(parts[-1][-1], Communication):
                    parts.append([])
                parts[-1].append(op)
        return parts

    def _buffers(self, unit: int) -> dict[str, Buffer]:
        """What a unit gathers, its partial results, and where those of others arrive."""
        made: dict[str, Buffer] = {}
        for side in (self.q, self.kv):
            made |= {} if side.rotates else side.buffers(side.line(unit))
        return made | self.q.stack_buffers(unit) | self.kv.stack_buffers(unit)
