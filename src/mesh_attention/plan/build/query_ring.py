"""Queries that rotate: the steps of pass-Q rings and of AGKV-RingQ/O (algorithm.md, section 9).

Keys stay; Q blocks go round along a `Rotation`. Partial results reach their owners by one
all-to-all at the end, or travel with their Q. All but the transfers is made once for a step
(`QuerySteps`) and shared by all members, as for keys (`key_ring.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.build.rotate import hop, ring
from mesh_attention.plan.build.tile_pass import TilePass
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.program import (
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
    Task,
)

Pieces = tuple[Piece, ...]
Stored = tuple[Kind, Precision]  # what a buffer holds, and how precisely


@dataclass(frozen=True, slots=True)
class Cast:
    """A partial result rounded to travel."""

    stored: Stored
    operation: Merge


class QuerySteps:
    """What all members hold alike at a step, made once and shared, as for keys (`KeySteps`)."""

    def __init__(self, mesh: TilePass) -> None:
        self._mesh = mesh
        self._block_rows = mesh.head_group.size(Kind.Q)
        self.inputs = mesh.q_inputs
        # What a partial result of a Q block consists of.
        self.kinds = tuple(kind for _, kind in mesh.q_partials())
        self.input_kinds = [(kind, mesh.precision_of(kind)) for kind in self.inputs]
        self.wire_kinds = [(kind, mesh.precision_of(kind)) for kind in self.kinds]
        self.sum_kinds = [(kind, Precision.ACCUMULATE) for kind in self.kinds]
        self.backward = mesh.direction is Direction.BACKWARD
        self.rule = MergeRule.SUM if self.backward else MergeRule.SOFTMAX
        self._attends: dict[tuple[int, tuple[Call, ...], bool], Operation] = {}
        self.queries = cache(self._queries)
        self.partial = cache(self._partial)
        self.results = self._pieces([mesh.head_group.local(kind) for kind in self.kinds])
        self.empty = cache(self._empty)
        self.merge_on = cache(self._merge_on)
        self.casts = cache(self._casts)

    def _pieces(self, names: list[str]) -> Pieces:
        return tuple(Piece(name, 0, self._block_rows) for name in names)

    def _queries(self, step: int) -> Pieces:
        local = self._mesh.head_group.local
        return self._pieces([f"{x}.{step}" if step else local(x) for x in self.inputs])

    def _partial(self, suffix: str) -> Pieces:
        """Partial results: `3.sum` of step 3, `3.wire` as it travels, `3.in` as it arrives, ..."""
        return self._pieces([f"{kind}.{suffix}" for kind in self.kinds])

    def attend(self, step: int, calls: tuple[Call, ...], *, fresh_kv: bool) -> Operation:
        key = (step, calls, fresh_kv)
        if key not in self._attends:
            self._attends[key] = self._attend(step, calls, fresh_kv)
        return self._attends[key]

    def _attend(self, step: int, calls: tuple[Call, ...], fresh_kv: bool) -> Operation:
        mesh, task, sums = self._mesh, Task("C", (step, 0)), self.partial(f"{step}.sum")
        query = dict(zip(self.inputs, self.queries(step), strict=True))
        keys = (mesh.kv_piece("k", 0), mesh.kv_piece("v", 0))
        if not self.backward:
            return Attend(task, query[Kind.Q], *keys, sums[0], sums[1], calls, fresh=True)
        return AttendBackward(
            task,
            query[Kind.Q],
            *keys,
            query[Kind.GRAD_OUT],
            query[Kind.LSE],
            query.get(Kind.OUT),
            query.get(Kind.DELTA),
            sums[0],
            mesh.kv_partial("grad_k", 0),
            mesh.kv_partial("grad_v", 0),
            calls,
            fresh_q=True,
            fresh_kv=fresh_kv,
        )

    def _empty(self, step: int) -> Operation:
        return Merge(Task("C", stage="empty"), self.rule, (), self.partial(f"{step}.sum"))

    def _merge_on(self, step: int) -> Operation:
        """RingQ/O: merge into what came with the block."""
        came = self.partial(f"{step}.sofar") if step > 1 else ()
        parts = self.partial(f"{step}.sum") + came
        return Merge(Task("O", (step,), "merge"), self.rule, parts, self.partial(f"{step}.wire"))

    def end_of_travel(self, *, came_back: bool) -> Operation:
        parts = self.partial("0.sum") + (self.partial("back") if came_back else ())
        return Merge(Task("O", stage="end"), self.rule, parts, self.results)

    def _casts(self, step: int) -> tuple[Pieces, tuple[Cast, ...]]:
        """Pass-Q: the pieces in which a partial travels, and the casts that it takes."""
        task, outgoing = Task(self._mesh.q_reduce_kind, (0,), "cast"), []
        casts = []
        for stored, total in zip(self.wire_kinds, self.partial(f"{step}.sum"), strict=True):
            wire = total.buffer if stored[0].is_statistic else self._mesh.wire(total.buffer)
            if wire == total.buffer:
                outgoing.append(total)
            else:
                outgoing.append(Piece(wire, 0, self._block_rows))
                casts.append(Cast(stored, Merge(task, MergeRule.SUM, (total,), (outgoing[-1],))))
        return tuple(outgoing), tuple(casts)

    def merge_all(self, num_steps: int) -> Operation:
        """The own partial and those of all others."""
        arrived = (piece for step in range(1, num_steps) for piece in self.partial(f"{step}.in"))
        parts = (*self.partial("0.sum"), *arrived)
        return Merge(Task(self._mesh.q_reduce_kind, (0,), "merge"), self.rule, parts, self.results)


class QueryRing:
    """The steps of one unit."""

    def __init__(
        self, mesh: TilePass, lowerings: Lowerings, steps: QuerySteps, unit: int, travel: bool
    ) -> None:
        self._mesh = mesh
        self._lowerings = lowerings
        self._steps = steps
        self._travel = travel
        tile, head_group = mesh.tile, mesh.head_group
        members = tile.q_group(tile.row(unit))
        self._rotation = ring(members.index(unit), len(members))
        self._group = head_group.group_name(f"Q{tile.row(unit)}")
        self._rows = [mesh.own_rows(Kind.Q, members[m]) for m in self._rotation.blocks]
        self._keys = lowerings.keys(mesh.kv_spans(tile.column(unit), 0))
        self._heads = head_group.heads(Kind.Q)
        self.has_key_gradients = False
        self.buffers: dict[str, Buffer] = {}
        for step in range(1, self._rotation.size):
            self._add(steps.queries(step), steps.input_kinds, step)

    def _add(self, pieces: Pieces, kinds: Sequence[Stored], step: int) -> None:
        """Declare the buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._heads
        for piece, (kind, precision) in zip(pieces, kinds, strict=True):
            self.buffers[piece.buffer] = Buffer(piece.buffer, kind, rows, heads, precision)

    def _calls(self, step: int) -> tuple[Call, ...]:
        return self._lowerings.calls(self._lowerings.queries(self._rows[step]), self._keys)

    def operations(self) -> list[Operation]:
        steps, rotation = self._steps, self._rotation
        operations: list[Operation] = []
        begun = False
        for step in range(rotation.size):
            if step + 1 < rotation.size:
                operations.append(
                    hop(Task("Q", (step + 1,)), self._group, rotation, step + 1, steps.queries)
                )
            self._add(steps.partial(f"{step}.sum"), steps.sum_kinds, step)
            calls = self._calls(step)
            if calls:
                operations.append(steps.attend(step, calls, fresh_kv=not begun))
                begun = begun or steps.backward
            else:
                operations.append(steps.empty(step))
            if self._travel and step > 0:
                operations += self._pass_on(step)
        self.has_key_gradients = begun
        if self._travel:
            return [*operations, steps.end_of_travel(came_back=rotation.size > 1)]
        return operations + self._exchange()

    def _pass_on(self, step: int) -> list[Operation]:
        """RingQ/O: merge into what came with the block, and send it after the block."""
        steps, way = self._steps, self._rotation.hops[0]
        last = step == self._rotation.size - 1
        suffix, arrives = ("back", 0) if last else (f"{step + 1}.sofar", step + 1)
        outgoing, incoming = steps.partial(f"{step}.wire"), steps.partial(suffix)
        self._add(outgoing, steps.wire_kinds, step)
        self._add(incoming, steps.wire_kinds, arrives)
        return [
            steps.merge_on(step),
            SendRecv(
                Task("O", (step,)), self._group, way.to_member, outgoing, way.from_member, incoming
            ),
        ]

    def _exchange(self) -> list[Operation]:
        """Pass-Q: every partial to its owner in one all-to-all; the own one stays."""
        steps, rotation = self._steps, self._rotation
        operations: list[Operation] = []
        sends: list[Pieces] = [()] * rotation.size
        receives: list[Pieces] = [()] * rotation.size
        for step in range(1, rotation.size):
            outgoing, casts = steps.casts(step)
            for cast in casts:
                self._add(cast.operation.outputs, (cast.stored,), step)
                operations.append(cast.operation)
            incoming = steps.partial(f"{step}.in")
            self._add(incoming, steps.wire_kinds, 0)
            sends[rotation.blocks[step]] = outgoing
            receives[rotation.users[step]] = incoming
        if rotation.size > 1:
            task = Task(self._mesh.q_reduce_kind, (0,))
            operations.append(AllToAll(task, self._group, tuple(sends), tuple(receives)))
        return [*operations, steps.merge_all(rotation.size)]
