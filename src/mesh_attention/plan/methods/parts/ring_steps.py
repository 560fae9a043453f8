"""Blocks of one side go round a ring, and the other side stays: the steps of one member.

Ring-Attention and the pass-Q ring are this with keys and with queries (algorithm.md, section 9).
Blocks go round along a `Rotation` (`rotate.py`). At each step a member attends from queries to
keys, one of which is the block that it holds. Partial results of the side that stays add up where
they are. Those of a block reach its owner direct or with the block, which for keys are gradients
only; or all at the end, by one all-to-all. `ring_order.py` asks for the operations of task after
task; StarTrail asks for all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.language.program import (
    AllToAll,
    Merge,
    MergeRule,
    Operation,
    SendRecv,
    Task,
)
from mesh_attention.plan.methods.parts.lower import COMPUTE, Lowerings, attention
from mesh_attention.plan.methods.parts.reduce import Pieces, by_member
from mesh_attention.plan.methods.parts.rotate import (
    Delivery,
    GradientRoute,
    Rotation,
    deliveries,
    ring,
)
from mesh_attention.plan.methods.parts.tile_plan import TilePass
from mesh_attention.plan.methods.parts.tile_side import TileSide
from mesh_attention.plan.problem.spans import Spans

_EMPTY = Task(COMPUTE, stage="empty")


@lru_cache(maxsize=1 << 14)
def _pieces(kinds: tuple[Kind, ...], name: str, rows: int) -> Pieces:
    """Members have the same buffer names at a step, so they share these pieces."""
    return tuple([Piece(f"{kind}.{name}", 0, rows) for kind in kinds])


@dataclass(frozen=True)
class RingRoute:
    """What goes round, and the way of its results to their owners.

    keys      keys go round, and queries stay; otherwise queries go round
    results   None: all at the end
    per_node  so many members follow each other in a node
    shared    operations that members share, which is all but transfers: those of n members with n
              steps each would take long to plan and to read
    """

    keys: bool
    results: GradientRoute | None
    per_node: int = 1
    shared: dict[object, list[Operation]] = field(default_factory=dict)

    def sides(self, tiles: TilePass) -> tuple[TileSide, TileSide]:
        """The side that goes round, and the side that stays."""
        return (tiles.kv, tiles.q) if self.keys else (tiles.q, tiles.kv)


class RingSteps:
    """The steps of one member; `buffers` grows with them.

    Each chunk of the moving side goes round in a ring of its own, one ring after the other. Steps
    are numbered through all rings: step s of ring r has number `r * size + s`. By number `rows` are
    the rows of the block of each step. By ring `own` are the pieces of the member's own block,
    which is that of step 0, and `results` the pieces for its results. `line` is the line of units
    whose rows of the other side the member has.
    """

    def __init__(
        self,
        tiles: TilePass,
        lowerings: Lowerings,
        route: RingRoute,
        line: int,
        group: str,
        rotation: Rotation,
        rows: Sequence[Spans],
        own: Sequence[Pieces],
        results: Sequence[Pieces],
    ) -> None:
        self._tiles, self._lowerings, self._route = tiles, lowerings, route
        self._group, self._rotation, self._size = group, rotation, rotation.size
        self._rows, self._own, self._results = rows, own, results
        self._sizes = [pieces[0].num_rows for pieces in own]  # of the blocks of each ring
        self._moving, self._staying = route.sides(tiles)
        self._kinds = self._moving.partials
        stays = [self._staying.spans(line, chunk.index) for chunk in self._staying.chunks]
        q_rows, k_rows = (stays, rows) if route.keys else (rows, stays)
        self._queries = [lowerings.queries(spans) for spans in q_rows]
        self._keys = [lowerings.keys(spans) for spans in k_rows]
        self._heads = [self._moving.own.heads_of(chunk) for chunk in self._moving.chunks]
        ways = route.results or GradientRoute.DIRECT
        self._deliveries = deliveries(rotation, ways, route.per_node)
        self._travels = route.results is GradientRoute.TRAVEL
        self._arrived: dict[int, list[Pieces]] = {}  # by number: results that came for its block
        self._begun = set[int]()  # numbers of steps with results in their accumulators
        self._begun_staying = set[int]()  # chunks of the other side with results in theirs
        self.buffers: dict[str, Buffer] = {}

    @staticmethod
    def of(
        tiles: TilePass, lowerings: Lowerings, route: RingRoute, unit: int, inner: int | None = None
    ) -> RingSteps:
        """Of a unit in the ring of its tile row or column; `inner`: units of an inner ring."""
        moving, staying = route.sides(tiles)
        line, local = moving.line(unit), tiles.head_group.local
        members = moving.members(line)
        rotation = ring(members.index(unit), len(members), inner)
        owners = [members[member] for member in rotation.blocks]
        if route.keys:
            rows = [moving.rows_of((x,), chunk.index) for chunk in moving.chunks for x in owners]
        else:
            rows = [moving.own_rows(owner) for owner in owners]
        own, results = (
            [tuple([chunk.local(local(kind)) for kind in kinds]) for chunk in moving.chunks]
            for kinds in (moving.inputs, moving.partials)
        )
        group = moving.group(line)
        line = staying.line(unit)
        return RingSteps(tiles, lowerings, route, line, group, rotation, rows, own, results)

    def operations(self, task: Task) -> list[Operation]:
        """Of the transfer of a block, of its results, of the end of a ring, or of an attention
        (`ring_order.py`)."""
        number = task.index[-1]
        match task.kind:
            case "KV" | "Q":
                return self._hop(task)
            case "sent":
                return self._send_on(number)
            case "end" if self._route.results:
                return self._end(number // self._size)
            case "end":
                return self._exchange()
            case _:
                return self._attend(task)

    def all_operations(self) -> list[Operation]:
        """Of one ring of keys with one Q chunk, step by step."""
        operations: list[Operation] = []
        for step in range(self._size):
            if step + 1 < self._size:
                operations += self._hop(Task("KV", (step + 1,)))
            operations += self._attend(Task(COMPUTE, (0, step)))
            operations += self._send_on(step)
        return operations + self.empty(Task(COMPUTE, (0,))) + self._end(0)

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results of a chunk that stays and that no attention has computed."""
        (index,) = task.index
        if index in self._begun_staying:
            return []
        return self._staying.empty(_EMPTY if self._route.keys else task.at("empty"), index)

    def _hop(self, task: Task) -> list[Operation]:
        """The transfer that brings the block of a step."""
        (number,) = task.index
        step = number % self._size
        way, arriving = self._rotation.hops[step - 1], self._block(number)
        self._declare(arriving, self._moving.inputs, number)
        passed_on = self._block(number - step + way.send_step)
        return [SendRecv(task, self._group, way.to_member, passed_on, way.from_member, arriving)]

    def _attend(self, task: Task) -> list[Operation]:
        """The attention of a chunk that stays and the block of a step."""
        tiles, keys, shared = self._tiles, self._route.keys, self._route.shared
        i, j = task.index
        index, number = (i, j) if keys else (j, i)
        sums = self._sums(number) if self._kinds else ()
        self._declare(sums, self._kinds, number, Precision.ACCUMULATE)
        calls = self._lowerings.calls(self._queries[i], self._keys[j])
        if not calls:
            return []
        first, begun = number not in self._begun, index in self._begun_staying
        self._begun.add(number)
        self._begun_staying.add(index)
        pieces = self._block(number)
        key: object = (index, number, pieces[0].buffer, calls, begun, first)
        if key not in shared:
            if keys:
                (k, v), totals = pieces, tiles.q.sums(i) + sums
                queries, fresh = tiles.q.pieces(i), (not begun, first)
            else:
                (k, v), totals = tiles.keys(j), sums + tiles.kv.sums(j)
                queries = dict(zip(tiles.q.inputs, pieces, strict=True))
                fresh = (first, not begun)
            shared[key] = [attention(task, queries, (k, v), totals, calls, fresh)]
        return shared[key]

    def _send_on(self, number: int) -> list[Operation]:
        """The transfers of results that are due once all chunks have met the block of a step."""
        if not self._kinds:
            return []
        operations: list[Operation] = []
        step = number % self._size
        # Queries have results at every step, whatever they see.
        if number not in self._begun and (step == 0 or not self._route.keys):
            self._begun.add(number)
            operations += self._merges(_EMPTY, [], self._sums(number))
        for delivery in self._deliveries[step] if self._route.results else ():
            operations += self._deliver(number - step, delivery)
        return operations

    def _deliver(self, first: int, delivery: Delivery) -> list[Operation]:
        """Sends this member's results of a step's block, with those that came with the block or
        for it. Gradients of keys that arrive by the direct way are added to those here; outputs
        wait until the last has arrived, so that the sum is rounded once. `first`: the number of the
        first step of the ring."""
        number, block = first + delivery.step, first + delivery.arrives
        task = Task("dKV" if self._route.keys else "O", (number,))
        parts = [self._sums(number)] * (number in self._begun) + self._arrived.pop(number, [])
        outgoing = self._partial(number, f"{number}.wire")
        incoming = self._partial(number, self._name_of_arriving(number, block, first))
        self._declare(outgoing, self._kinds, number)
        self._declare(incoming, self._kinds, block)
        key, shared = ("sum", number, *[part[0].buffer for part in parts]), self._route.shared
        if key not in shared:
            stage = task.at("sum" if self._route.keys else "merge")
            shared[key] = self._merges(stage, parts, outgoing)
        to, source = delivery.to_member, delivery.from_member
        transfer = SendRecv(task, self._group, to, outgoing, source, incoming)
        operations = [*shared[key], transfer]
        if self._travels or not self._route.keys:
            self._arrived.setdefault(block, []).append(incoming)
            return operations
        totals = self._sums(block)
        self._declare(totals, self._kinds, block, Precision.ACCUMULATE)
        begun = block in self._begun
        self._begun.add(block)
        key = "arrived", number, block, begun
        if key not in shared:
            parts = [totals, incoming] if begun else [incoming]
            shared[key] = self._merges(task.at("arrived"), parts, totals)
        return operations + shared[key]

    def _end(self, part: int) -> list[Operation]:
        """The total results of the member's own block, with those that came for it."""
        first = part * self._size
        task = Task("dKV" if self._route.keys else "O", stage="end")
        parts = [self._sums(first), *self._arrived.get(first, ())]
        return self._merges(task, parts, self._results[part])

    def _exchange(self) -> list[Operation]:
        """Pass-Q: partial results go to their owners in one all-to-all; the unit's own stay."""
        rotation, task = self._rotation, Task(self._moving.reduce_kind, (0,))
        operations: list[Operation] = []
        sends: dict[int, Pieces] = {}
        receives: dict[int, Pieces] = {}
        for step in range(1, rotation.size):
            outgoing: Pieces = ()
            for kind, total in zip(self._kinds, self._sums(step), strict=True):
                sent = (replace(total, buffer=self._tiles.head_group.wire(kind, total.buffer)),)
                if sent != (total,):
                    self._declare(sent, (kind,), step)
                    operations.append(Merge(task.at("cast"), MergeRule.SUM, (total,), sent))
                outgoing += sent
            incoming = self._partial(0, f"{step}.in")
            self._declare(incoming, self._kinds, 0)
            sends[rotation.blocks[step]] = outgoing
            receives[rotation.users[step]] = incoming
        if rotation.size > 1:
            pieces = (by_member(rotation.size, by_place) for by_place in (sends, receives))
            operations.append(AllToAll(task, self._group, *pieces))
        parts = [self._sums(0), *receives.values()]
        return operations + self._merges(task.at("merge"), parts, self._results[0])

    def _merges(self, task: Task, parts: Sequence[Pieces], results: Pieces) -> list[Operation]:
        """Of an output with its LSE, or of each gradient."""
        merges: list[Operation] = []
        at = 0
        for kinds in self._moving.together:
            group = slice(at, at + len(kinds))
            inputs = tuple([piece for part in parts for piece in part[group]])
            merges.append(Merge(task, self._moving.merge_rule, inputs, results[group]))
            at = group.stop
        return merges

    def _block(self, number: int) -> Pieces:
        part, step = divmod(number, self._size)
        if not step:
            return self._own[part]
        return _pieces(self._moving.inputs, str(number), self._sizes[number // self._size])

    def _sums(self, number: int) -> Pieces:
        """The accumulators of a step's block."""
        return self._partial(number, f"{number}" if self._route.keys else f"{number}.sum")

    def _partial(self, number: int, name: str) -> Pieces:
        """Partial results of a step's block: `3.wire` as they are sent, ..."""
        return _pieces(self._kinds, name, self._sizes[number // self._size])

    def _name_of_arriving(self, number: int, block: int, first: int) -> str:
        if self._travels and block != first:
            return f"{block}.sofar"
        if self._route.keys:
            return f"back{number}"
        return "back" if self._travels else f"{number}.in"

    def _declare(
        self,
        pieces: Pieces,
        kinds: tuple[Kind, ...],
        number: int,
        precision: Precision | None = None,
    ) -> None:
        """The buffers that hold rows of a step's block."""
        rows, heads = self._rows[number], self._heads[number // self._size]
        for piece, kind in zip(pieces, kinds, strict=True):
            name = piece.buffer
            self.buffers[name] = Buffer(name, kind, rows, heads, precision or kind.precision)
