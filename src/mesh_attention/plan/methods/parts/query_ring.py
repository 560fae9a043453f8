"""Boxes whose queries rotate while keys stay: pass-Q rings and AGKV-RingQ/O (algorithm.md, 9).

Q blocks go round along a `Rotation`. Partial results reach their owners by one all-to-all at the
end, or after each step: direct, or with their Q block (`rotate.py`). `Q-3` brings the block of step
3, `C-3-0` is its attention, and `sent-3` sends its results on. `box.py` makes a `QueryOrder` for a
pass and asks it for the `QueryRing` of each unit.
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
from mesh_attention.plan.methods.parts.rotate import GradientRoute, deliveries, hop, ring
from mesh_attention.plan.methods.parts.tile_pass import COMPUTE, Pieces, TilePass, attention
from mesh_attention.plan.methods.parts.tile_side import GATHER_KV


class QueryOrder:
    """The order of the tasks, which all units share. `results`: the way of partial results to their
    owners; None: all at the end."""

    in_parts = False  # rotations leave nothing to wait for

    def __init__(self, tiles: TilePass, results: GradientRoute | None) -> None:
        self._tiles, self.results = tiles, results
        self.per_node = tiles.q.per_node if results is GradientRoute.DIRECT else 1
        self.tasks = [Task(GATHER_KV, (0,))]
        steps = [Step(self.tasks[0], ())]
        size = tiles.tile.a
        for step, sent in enumerate(deliveries(ring(0, size), per_node=self.per_node)):
            following = [Task("Q", (step + 1,))] if step + 1 < size else []
            attend = Task(COMPUTE, (step, 0))
            self.tasks += [*following, attend, Task("sent", (step,))]
            steps.append(Step(following[0] if following else None, (attend,)))
            steps += [Step(Task("O", (delivery.step,)), ()) for delivery in sent if results]
        self.tasks.append(Task("end", (0,)))
        if not results:
            steps.append(Step(Task(tiles.q.reduce_kind, (0,)), ()))
        if tiles.kv.reduce_kind:
            self.tasks.append(Task(tiles.kv.reduce_kind, (0,)))
            steps.append(Step(self.tasks[-1], ()))
        self.steps = tuple(steps)

    @property
    def setting(self) -> dict[str, str]:
        q_reduce = self.results.value if self.results else "all-to-all"
        return {"tile": str(self._tiles.tile), "q": "ring", "q_reduce": q_reduce}

    def unit(self, tiles: TilePass, lowerings: Lowerings, unit: int) -> QueryRing:
        return QueryRing(self, tiles, lowerings, unit)


class QueryRing:
    """The operations of one unit, task by task; `buffers` grows with them."""

    def __init__(self, order: QueryOrder, tiles: TilePass, lowerings: Lowerings, unit: int) -> None:
        tile, head_group = tiles.tile, tiles.head_group
        members = tile.q_group(tile.row(unit))
        self._tiles = tiles
        self._route = order.results
        self._rotation = ring(members.index(unit), len(members))
        route = order.results or GradientRoute.DIRECT
        self._deliveries = deliveries(self._rotation, route, order.per_node)
        self._arrived: dict[int, Pieces] = {}  # by step: results from others for its block
        self._group = tiles.q.group(tile.row(unit))
        self._rows = [tiles.q.own_rows(members[m]) for m in self._rotation.blocks]
        self._kinds = tiles.q.partials
        self._results = self._pieces(map(head_group.local, self._kinds))
        keys = lowerings.keys(tiles.kv.spans(tile.column(unit), 0))
        self._calls = [lowerings.calls(lowerings.queries(rows), keys) for rows in self._rows]
        self._begun = False  # whether an attention has filled gradients of the keys
        self.buffers: dict[str, Buffer] = {}

    def operations(self, task: Task) -> list[Operation]:
        step, merge_rule = task.index[0], self._tiles.q.merge_rule
        match task.kind:
            case "Q":
                self._declare(self._queries(step), self._tiles.q.inputs, step)
                return [hop(task, self._group, self._rotation, step, self._queries)]
            case "sent":
                return self._deliver(step) if self._route else []
            case "end" if self._route:
                parts = self._partial("0.sum") + self._arrived.get(0, ())
                return [Merge(Task("O", stage="end"), merge_rule, parts, self._results)]
            case "end":
                return self._exchange()
            case _:
                return [self._attend(task)]

    def empty(self, task: Task) -> list[Operation]:
        """Zero gradients of the keys, if no attention of the unit has filled them."""
        return [] if self._begun else self._tiles.kv.empty(*task.index)

    def _attend(self, task: Task) -> Operation:
        tiles, (step, _) = self._tiles, task.index
        calls, sums = self._calls[step], self._partial(f"{step}.sum")
        self._declare(sums, self._kinds, step, Precision.ACCUMULATE)
        if not calls:
            return Merge(Task("C", stage="empty"), tiles.q.merge_rule, (), sums)
        queries = dict(zip(tiles.q.inputs, self._queries(step), strict=True))
        fresh, self._begun = (True, not self._begun), True
        return attention(task, queries, tiles.keys(0), sums + tiles.kv.sums(0), calls, fresh)

    def _pieces(self, names: Iterable[str]) -> Pieces:
        rows = self._tiles.q.own.size
        return tuple([Piece(name, 0, rows) for name in names])

    def _queries(self, step: int) -> Pieces:
        local = self._tiles.head_group.local
        return self._pieces(f"{k}.{step}" if step else local(k) for k in self._tiles.q.inputs)

    def _partial(self, suffix: str) -> Pieces:
        """Partial results: `3.sum` of step 3, `3.wire` as it is sent, `3.in` as it arrives, ..."""
        return self._pieces(f"{kind}.{suffix}" for kind in self._kinds)

    def _declare(
        self, pieces: Pieces, kinds: tuple[Kind, ...], step: int, precision: Precision | None = None
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._rows[step], self._tiles.q.own.heads
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, rows, heads, precision or kind.precision)

    def _deliver(self, step: int) -> list[Operation]:
        """Sends results of blocks, merged with the results that arrived for them. On the direct
        route those wait until the last has arrived, so that the sum is rounded once."""
        operations: list[Operation] = []
        for sent, to, source, block in self._deliveries[step]:
            parts = self._partial(f"{sent}.sum") + self._arrived.pop(sent, ())
            suffix = f"{sent}.in"
            if self._route is GradientRoute.TRAVEL:
                suffix = f"{block}.sofar" if block else "back"
            outgoing, incoming = self._partial(f"{sent}.wire"), self._partial(suffix)
            self._declare(outgoing, self._kinds, sent)
            self._declare(incoming, self._kinds, block)
            self._arrived[block] = self._arrived.get(block, ()) + incoming
            task = Task("O", (sent,))
            operations += [
                Merge(task.at("merge"), self._tiles.q.merge_rule, parts, outgoing),
                SendRecv(task, self._group, to, outgoing, source, incoming),
            ]
        return operations

    def _exchange(self) -> list[Operation]:
        """Pass-Q: partial results go to their owners in one all-to-all; the unit's own stay."""
        tiles, rotation, task = self._tiles, self._rotation, Task(self._tiles.q.reduce_kind, (0,))
        operations: list[Operation] = []
        sends: dict[int, Pieces] = {}
        receives: dict[int, Pieces] = {}
        for step in range(1, rotation.size):
            outgoing: Pieces = ()
            for kind, total in zip(self._kinds, self._partial(f"{step}.sum"), strict=True):
                sent = self._pieces([tiles.head_group.wire(kind, total.buffer)])
                if sent != (total,):
                    self._declare(sent, (kind,), step)
                    operations.append(Merge(task.at("cast"), MergeRule.SUM, (total,), sent))
                outgoing += sent
            incoming = self._partial(f"{step}.in")
            self._declare(incoming, self._kinds, 0)
            sends[rotation.blocks[step]] = outgoing
            receives[rotation.users[step]] = incoming
        if rotation.size > 1:
            pieces = (by_member(rotation.size, by_place) for by_place in (sends, receives))
            operations.append(AllToAll(task, self._group, *pieces))
        parts = self._partial("0.sum") + sum(receives.values(), ())
        return [*operations, Merge(task.at("merge"), tiles.q.merge_rule, parts, self._results)]
