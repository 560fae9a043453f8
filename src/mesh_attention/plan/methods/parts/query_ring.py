"""Queries that rotate: the steps of pass-Q rings and of AGKV-RingQ/O (algorithm.md, section 9).

Keys stay; Q blocks go round along a `Rotation`. Partial results reach their owners by one
all-to-all at the end, or meanwhile: direct, or travelling with their Q (`rotate.py`).
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
from mesh_attention.plan.language.tasks import Step
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.reduce import by_member
from mesh_attention.plan.methods.parts.rotate import Reach, deliveries, hop, ring
from mesh_attention.plan.methods.parts.tile_pass import Pieces, TilePass


class QueryOrder:
    """`tasks` are those of the programs: `Q-3` brings the block of a step, `C-3-0` is its
    attention, `sent-3` sends its results on. `steps` is the schedule. `reach`: how partial results
    reach their owners, None: all at the end."""

    in_parts = False

    def __init__(self, mesh: TilePass, reach: Reach | None) -> None:
        self.reach = reach
        self.per_node = mesh.q.in_node if reach is Reach.DIRECT else None
        self.tasks = [Task("AG-KV", (0,))]
        steps = [Step(self.tasks[0], ())]
        size = mesh.tile.a
        for step, back in enumerate(deliveries(ring(0, size), self.per_node)):
            following = Task("Q", (step + 1,)) if step + 1 < size else None
            attention = Task("C", (step, 0))
            self.tasks += [*filter(None, [following]), attention, Task("sent", (step,))]
            steps.append(Step(following, (attention,)))
            steps += [Step(Task("O", (one.step,)), ()) for one in back if reach]
        self.tasks.append(Task("end", (0,)))
        if not reach:
            steps.append(Step(Task(mesh.q_reduce_kind, (0,)), ()))
        if mesh.kv_reduce_kind:
            self.tasks.append(Task(mesh.kv_reduce_kind, (0,)))
            steps.append(Step(self.tasks[-1], ()))
        self.steps = tuple(steps)

    def blocks(self, mesh: TilePass, lowerings: Lowerings, unit: int) -> QueryRing:
        return QueryRing(mesh, lowerings, unit, self)


class QueryRing:
    """What one unit does."""

    def __init__(self, mesh: TilePass, lowerings: Lowerings, unit: int, order: QueryOrder) -> None:
        tile, head_group = mesh.tile, mesh.head_group
        members = tile.q_group(tile.row(unit))
        self._mesh = mesh
        self._reach = order.reach
        self._rotation = ring(members.index(unit), len(members))
        self._deliveries = deliveries(self._rotation, order.per_node)
        self._arrived: dict[int, Pieces] = {}  # parts of the block of a step
        self._group = mesh.q.group(tile.row(unit))
        self._rows = [mesh.q.own_rows(members[m]) for m in self._rotation.blocks]
        self._kinds = mesh.q_partials  # of a partial result
        self._results = self._pieces(map(head_group.local, self._kinds))
        keys = lowerings.keys(mesh.kv.spans(tile.column(unit), 0))
        self._calls = [lowerings.calls(lowerings.queries(rows), keys) for rows in self._rows]
        self._begun = False  # whether gradients of the keys hold something
        self.buffers: dict[str, Buffer] = {}

    def attend(self, task: Task) -> list[Operation]:
        """Of the block of a step."""
        mesh, (step, _) = self._mesh, task.index
        calls, sums = self._calls[step], self._partial(f"{step}.sum")
        self._declare(sums, self._kinds, step, Precision.ACCUMULATE)
        if not calls:
            return [Merge(Task("C", stage="empty"), mesh.merge_rule, (), sums)]
        queries = dict(zip(mesh.q.inputs, self._queries(step), strict=True))
        operands = (queries, mesh.keys(0), sums + mesh.kv.sums(0), calls)
        fresh, self._begun = (True, not self._begun), True
        return [mesh.attention(task, *operands, fresh)]

    def rotate(self, task: Task) -> list[Operation]:
        """The block of a step, its results on their way, or the end."""
        (step,) = task.index
        match task.kind:
            case "Q":
                self._declare(self._queries(step), self._mesh.q.inputs, step)
                return [hop(task, self._group, self._rotation, step, self._queries)]
            case "sent" if self._reach is Reach.TRAVEL:
                return self._pass_on(step) if step else []
            case "sent":
                return self._deliver(step) if self._reach else []
            case _:
                return self._end() if self._reach else self._exchange()

    def empty(self, task: Task) -> list[Operation]:
        """Neutral gradients of keys that no query sees."""
        return [] if self._begun else self._mesh.kv.empty(task.kind, *task.index)

    def _pieces(self, names: Iterable[str]) -> Pieces:
        rows = self._mesh.head_group.size(Kind.Q)
        return tuple(Piece(name, 0, rows) for name in names)

    def _queries(self, step: int) -> Pieces:
        local = self._mesh.head_group.local
        return self._pieces(f"{x}.{step}" if step else local(x) for x in self._mesh.q.inputs)

    def _partial(self, suffix: str) -> Pieces:
        """Partial results: `3.sum` of step 3, `3.wire` as it travels, `3.in` as it arrives, ..."""
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
        """RingQ/O: merge into what came with the block, and send it after the block."""
        way, last = self._rotation.hops[0], step == self._rotation.size - 1
        suffix, arrives = ("back", 0) if last else (f"{step + 1}.sofar", step + 1)
        parts = self._partial(f"{step}.sum") + (self._partial(f"{step}.sofar") if step > 1 else ())
        return self._send(step, parts, way.to_member, way.from_member, suffix, arrives)

    def _deliver(self, step: int) -> list[Operation]:
        """Parts wait until all of a block are there: merged at once, they are rounded once."""
        operations: list[Operation] = []
        for of, to_member, from_member, block in self._deliveries[step]:
            parts = self._partial(f"{of}.sum") + self._arrived.pop(of, ())
            operations += self._send(of, parts, to_member, from_member, f"{of}.in", block)
            self._arrived[block] = self._arrived.get(block, ()) + self._partial(f"{of}.in")
        return operations

    def _send(
        self, step: int, parts: Pieces, to: int, source: int, suffix: str, arrives: int
    ) -> list[Operation]:
        """Parts of the results of a step's block as one; what comes is of that of `arrives`."""
        outgoing, incoming = self._partial(f"{step}.wire"), self._partial(suffix)
        self._declare(outgoing, self._kinds, step)
        self._declare(incoming, self._kinds, arrives)
        task = Task("O", (step,))
        merge = Merge(task.at("merge"), self._mesh.merge_rule, parts, outgoing)
        return [merge, SendRecv(task, self._group, to, outgoing, source, incoming)]

    def _end(self) -> list[Operation]:
        came = self._arrived.get(0, ())
        if self._reach is Reach.TRAVEL and self._rotation.size > 1:
            came = self._partial("back")
        parts = self._partial("0.sum") + came
        return [Merge(Task("O", stage="end"), self._mesh.merge_rule, parts, self._results)]

    def _exchange(self) -> list[Operation]:
        """Pass-Q: every partial to its owner in one all-to-all; the own one stays."""
        mesh, rotation, task = self._mesh, self._rotation, Task(self._mesh.q_reduce_kind, (0,))
        operations: list[Operation] = []
        sends: dict[int, Pieces] = {}
        receives: dict[int, Pieces] = {}
        arrived: Pieces = ()
        for step in range(1, rotation.size):
            outgoing = []
            for kind, total in zip(self._kinds, self._partial(f"{step}.sum"), strict=True):
                wire = total.buffer if kind.is_statistic else mesh.q.wire(total.buffer)
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
        return [*operations, Merge(task.at("merge"), mesh.merge_rule, parts, self._results)]
