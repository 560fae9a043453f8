"""Queries that rotate: the steps of pass-Q rings and of AGKV-RingQ/O (algorithm.md, section 9).

Keys stay; Q blocks go round along a `Rotation`. Partial results reach their owners by one
all-to-all at the end, or after each step: direct, or with their Q block (`rotate.py`). Used by the
box, in the order of `QueryOrder`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.program import (
    AllToAll,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
    Task,
)
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.reduce import by_member
from mesh_attention.plan.methods.parts.rotate import GradientRoute, deliveries, hop, ring
from mesh_attention.plan.methods.parts.task_orders import QueryOrder
from mesh_attention.plan.methods.parts.tile_pass import Pieces, TilePass, attention


class QueryRing:
    """What one unit of a box does."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, unit: int, order: QueryOrder) -> None:
        tile, head_group = mesh.tile, mesh.head_group
        members = tile.q_group(tile.row(unit))
        self._mesh = mesh
        self._route = order.results
        self._rotation = ring(members.index(unit), len(members))
        self._deliveries = deliveries(self._rotation, order.per_node)
        self._arrived: dict[int, Pieces] = {}  # parts of the block of a step
        self._group = mesh.q.group(tile.row(unit))
        self._rows = [mesh.q.own_rows(members[m]) for m in self._rotation.blocks]
        self._kinds = mesh.q.partials
        self._results = self._pieces(map(head_group.local, self._kinds))
        keys = lowerings.keys(mesh.kv.spans(tile.column(unit), 0))
        self._calls = [lowerings.calls(lowerings.queries(rows), keys) for rows in self._rows]
        self._begun = False  # whether gradients of the keys hold something
        self.buffers: dict[str, Buffer] = {}

    def attend(self, task: Task) -> list[Operation]:
        """The attention of the block of a step."""
        mesh, (step, _) = self._mesh, task.index
        calls, sums = self._calls[step], self._partial(f"{step}.sum")
        self._declare(sums, self._kinds, step, Precision.ACCUMULATE)
        if not calls:
            return [Merge(Task("C", stage="empty"), mesh.q.merge_rule, (), sums)]
        queries = dict(zip(mesh.q.inputs, self._queries(step), strict=True))
        fresh, self._begun = (True, not self._begun), True
        return [attention(task, queries, mesh.keys(0), sums + mesh.kv.sums(0), calls, fresh)]

    def rotate(self, task: Task) -> list[Operation]:
        """The transfer of the block of a step, or of its results, or the end."""
        (step,) = task.index
        match task.kind:
            case "Q":
                self._declare(self._queries(step), self._mesh.q.inputs, step)
                return [hop(task, self._group, self._rotation, step, self._queries)]
            case "sent" if self._route is GradientRoute.TRAVEL:
                return self._pass_on(step) if step else []
            case "sent":
                return self._deliver(step) if self._route else []
            case _:
                return self._end() if self._route else self._exchange()

    def empty(self, task: Task) -> list[Operation]:
        """Neutral gradients of keys that no query sees."""
        return [] if self._begun else self._mesh.kv.empty(*task.index)

    def _pieces(self, names: Iterable[str]) -> Pieces:
        rows = self._mesh.head_group.size(Kind.Q)
        return tuple(Piece(name, 0, rows) for name in names)

    def _queries(self, step: int) -> Pieces:
        local = self._mesh.head_group.local
        return self._pieces(f"{x}.{step}" if step else local(x) for x in self._mesh.q.inputs)

    def _partial(self, suffix: str) -> Pieces:
        """Partial results: `3.sum` of step 3, `3.wire` as it is sent, `3.in` as it arrives, ..."""
        return self._pieces(f"{kind}.{suffix}" for kind in self._kinds)

    def _declare(
        self, pieces: Pieces, kinds: tuple[Kind, ...], step: int, precision: Precision | None = None
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._mesh.head_group.heads(Kind.Q)
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, rows, heads, precision or kind.precision)

    def _pass_on(self, step: int) -> list[Operation]:
        """RingQ/O: merges into what came with the block, and sends it after the block."""
        way, last = self._rotation.hops[0], step == self._rotation.size - 1
        suffix, arrives = ("back", 0) if last else (f"{step + 1}.sofar", step + 1)
        parts = self._partial(f"{step}.sum") + (self._partial(f"{step}.sofar") if step > 1 else ())
        return self._send(step, parts, way.to_member, way.from_member, suffix, arrives)

    def _deliver(self, step: int) -> list[Operation]:
        """Parts wait until all of a block have come: merged at once, they are rounded once."""
        operations: list[Operation] = []
        for sent, to_member, from_member, block in self._deliveries[step]:
            parts = self._partial(f"{sent}.sum") + self._arrived.pop(sent, ())
            operations += self._send(sent, parts, to_member, from_member, f"{sent}.in", block)
            self._arrived[block] = self._arrived.get(block, ()) + self._partial(f"{sent}.in")
        return operations

    def _send(
        self, step: int, parts: Pieces, to: int, source: int, suffix: str, arrives: int
    ) -> list[Operation]:
        """Sends the merged parts of the results of a step's block; what comes belongs to the block
        of step `arrives`."""
        outgoing, incoming = self._partial(f"{step}.wire"), self._partial(suffix)
        self._declare(outgoing, self._kinds, step)
        self._declare(incoming, self._kinds, arrives)
        task = Task("O", (step,))
        merge = Merge(task.at("merge"), self._mesh.q.merge_rule, parts, outgoing)
        return [merge, SendRecv(task, self._group, to, outgoing, source, incoming)]

    def _end(self) -> list[Operation]:
        came = self._arrived.get(0, ())
        if self._route is GradientRoute.TRAVEL and self._rotation.size > 1:
            came = self._partial("back")
        parts = self._partial("0.sum") + came
        return [Merge(Task("O", stage="end"), self._mesh.q.merge_rule, parts, self._results)]

    def _exchange(self) -> list[Operation]:
        """Pass-Q: every partial to its owner in one all-to-all; the own one stays."""
        mesh, rotation, task = self._mesh, self._rotation, Task(self._mesh.q.reduce_kind, (0,))
        operations: list[Operation] = []
        sends: dict[int, Pieces] = {}
        receives: dict[int, Pieces] = {}
        arrived: Pieces = ()
        for step in range(1, rotation.size):
            outgoing = []
            for kind, total in zip(self._kinds, self._partial(f"{step}.sum"), strict=True):
                wire = mesh.q.wire(kind, total.buffer)
                (travels,) = self._pieces([wire])
                if travels != total:
                    self._declare((travels,), (kind,), step)
                    operations.append(Merge(task.at("cast"), MergeRule.SUM, (total,), (travels,)))
                outgoing.append(travels)
            incoming = self._partial(f"{step}.in")
            self._declare(incoming, self._kinds, 0)
            sends[rotation.blocks[step]] = tuple(outgoing)
            receives[rotation.users[step]] = incoming
            arrived += incoming
        if rotation.size > 1:
            by_step = (by_member(rotation.size, pieces) for pieces in (sends, receives))
            operations.append(AllToAll(task, self._group, *by_step))
        parts = self._partial("0.sum") + arrived
        return [*operations, Merge(task.at("merge"), mesh.q.merge_rule, parts, self._results)]
