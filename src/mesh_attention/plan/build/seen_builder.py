"""Programs in which each rank receives just the keys that its queries see, slice by slice of heads.

Forward a slice is one all-to-all and one attention. Backward it is the same all-to-all, the
gradients of that attention, and an all-to-all that brings partial dK and dV to the owners of the
rows, who add them up in wide precision. Where no rank sees a row of another nothing is exchanged.

Names inside a program: `k.0` are the gathered keys of slice 0, `grad_k.0` their partial gradients,
`.wire` what travels, `.in` what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision
from mesh_attention.plan.build.chunks import Chunk
from mesh_attention.plan.build.exchange import Unit
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.build.seen_rows import SeenRows
from mesh_attention.plan.build.seen_share import ByRank, SeenShare, Stretches, Summand
from mesh_attention.plan.build.tile_side import ALL_UNITS
from mesh_attention.plan.layout import Spans
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
    Task,
)
from mesh_attention.plan.schedule.slices import follow_each_other
from mesh_attention.plan.schedule.tasks import Schedule, Step

KEYS, GRADIENTS = (Kind.K, Kind.V), (Kind.GRAD_K, Kind.GRAD_V)
GATHER, COMPUTE, REDUCE = "AG-KV", "C", "RS-dKV"  # kinds of tasks
# The next transfer is often due while the attention before it still runs.
HOLD = 1


class SeenBuilder:
    """What `with_exchanges` asks of a method."""

    def __init__(
        self,
        head_group: HeadGroup,
        direction: Direction,
        seen: SeenRows,
        shares: Callable[[int], SeenShare],
        lowerings: Lowerings,
        slices: tuple[int, ...],
        *,
        gather_out: bool,
    ) -> None:
        self.head_group = head_group
        self.direction = direction
        self._statistic = Kind.OUT if gather_out else Kind.DELTA
        self.needs: tuple[Kind, ...] = (Kind.Q, *KEYS)
        if direction is Direction.BACKWARD:
            self.needs += (Kind.GRAD_OUT, Kind.LSE, self._statistic)
        self.hold = HOLD if seen.travels else 0
        self._seen = seen
        self._shares = shares
        self._lowerings = lowerings
        self._slices = slices
        self._q = head_group.chunks(Kind.Q, 1, slices)
        self._kv = head_group.chunks(Kind.K, 1, slices)
        self._pieces, self._piece = cache(_pieces), cache(Piece)  # ranks exchange alike rows
        self.schedule = self._make_schedule()

    @property
    def setting(self) -> dict[str, str]:
        setting = {"travels": "what is seen" if self._seen.travels else "nothing"}
        if len(self._slices) > 1:
            setting["head_slices"] = "+".join(map(str, self._slices))
        return setting

    def groups(self) -> dict[str, tuple[int, ...]]:
        return {ALL_UNITS: tuple(range(self._num_ranks))} if self._seen.travels else {}

    @property
    def _num_ranks(self) -> int:
        return self.head_group.num_units

    def _make_schedule(self) -> Schedule:
        def of_slice(part: int) -> Schedule:
            steps = [Step(Task(GATHER, (part,)), ())] if self._seen.travels else []
            steps.append(Step(None, (Task(COMPUTE, (part, part)),)))
            if self.direction is Direction.BACKWARD:
                steps.append(Step(Task(REDUCE, (part,)), ()))
            return Schedule(tuple(steps))

        return follow_each_other([of_slice(part) for part in range(len(self._slices))])

    def unit(self, unit: int) -> Unit:
        share = self._shares(unit)
        calls = self._calls(share)
        operations: list[Operation] = []
        later: list[Operation] = []  # sums stand behind the attention that hides their transfer
        for task in self.schedule.order():
            part = task.index[0]
            if task.kind == GATHER:
                operations.append(self._gather(task, share, part))
            elif task.kind == COMPUTE:
                operations += [*self._attention(task, share, part, calls), *later]
                later = []
            else:
                sent = self._to_owners(task, share, part)
                sums = self._sums(task, share, part)
                operations += sent or sums
                later += sums if sent else []
        return Unit([*operations, *later], self._buffers(share))

    def _calls(self, share: SeenShare) -> tuple[Call, ...]:
        if not share.rows:
            return ()
        queries = self._lowerings.queries(self.head_group.rows(Kind.Q, share.rank))
        return self._lowerings.calls(queries, self._lowerings.keys(share.rows))

    # Operations.

    def _gather(self, task: Task, share: SeenShare, part: int) -> AllToAll:
        own = tuple(self.head_group.local(kind) for kind in KEYS)
        sends = self._by_member(share.given, own, self._kv[part].heads)
        receives = self._by_member(share.gathered, tuple(f"{kind}.{part}" for kind in KEYS))
        return AllToAll(task, ALL_UNITS, sends, receives)

    def _by_member(
        self, rows: ByRank, buffers: tuple[str, ...], heads: tuple[int, int] | None = None
    ) -> tuple[tuple[Piece, ...], ...]:
        pieces: list[tuple[Piece, ...]] = [()] * self._num_ranks
        for member, stretches in rows.items():
            pieces[member] = self._pieces(buffers, stretches, heads)
        return tuple(pieces)

    def _attention(
        self, task: Task, share: SeenShare, part: int, calls: tuple[Call, ...]
    ) -> list[Operation]:
        forward = self.direction is Direction.FORWARD
        results = (Kind.OUT, Kind.LSE) if forward else (Kind.GRAD_Q,)
        ends = tuple(self._local(kind, part) for kind in results)
        rule = MergeRule.SOFTMAX if forward else MergeRule.SUM
        if not share.rows:
            return [Merge(task.at("empty"), rule, (), ends)]
        slots = self.head_group.q_layout.slots
        sums = tuple(Piece(f"{kind}.{part}", 0, slots) for kind in results)
        copy = Merge(task.at("copy"), rule, sums, ends)
        if forward:
            q, keys, (out, lse) = self._local(Kind.Q, part), self._keys(share, part), sums
            return [Attend(task, q, *keys, out, lse, calls, True), copy]
        return [self._gradients(task, share, part, calls, *sums), copy]

    def _gradients(
        self, task: Task, share: SeenShare, part: int, calls: tuple[Call, ...], grad_q: Piece
    ) -> AttendBackward:
        q, grad_out, lse, statistic = (
            self._local(kind, part) for kind in (Kind.Q, Kind.GRAD_OUT, Kind.LSE, self._statistic)
        )
        out, delta = (statistic, None) if self._statistic is Kind.OUT else (None, statistic)
        grad_k, grad_v = (Piece(f"{kind}.{part}", 0, share.num_rows) for kind in GRADIENTS)
        keys, results = self._keys(share, part), (grad_q, grad_k, grad_v)
        return AttendBackward(
            task, q, *keys, grad_out, lse, out, delta, *results, calls, True, True
        )

    def _local(self, kind: Kind, part: int) -> Piece:
        chunk = (self._kv if kind.is_key_side else self._q)[part]
        return chunk.local(self.head_group.local(kind))

    def _keys(self, share: SeenShare, part: int) -> tuple[Piece, Piece]:
        k, v = (
            self._local(kind, part) if share.local else Piece(f"{kind}.{part}", 0, share.num_rows)
            for kind in KEYS
        )
        return k, v

    def _to_owners(self, task: Task, share: SeenShare, part: int) -> list[Operation]:
        """What others own of the partial gradients, and theirs of own rows."""
        if not self._seen.travels:
            return []
        operations: list[Operation] = []
        partials = [f"{kind}.{part}" for kind in GRADIENTS]
        wires = [self._own_partial(share, name) for name in partials]
        for name, wire in zip(partials, wires, strict=True):
            if wire != name:
                whole, travels = (Piece(buffer, 0, share.num_rows) for buffer in (name, wire))
                operations.append(Merge(task.at("cast"), MergeRule.SUM, (whole,), (travels,)))
        others = {m: rows for m, rows in share.gathered.items() if m != share.rank}
        sends = self._by_member(others, tuple(wires))
        receives = self._by_member(share.stacked, tuple(f"{name}.in" for name in partials))
        return [*operations, AllToAll(task, ALL_UNITS, sends, receives)]

    def _own_partial(self, share: SeenShare, name: str) -> str:
        """The buffer in which partials travel; those of a rank that sends none stay wide."""
        problem = self.head_group.problem
        same = problem.accumulate_bytes == problem.element_bytes
        return name if same or share.local else f"{name}.wire"

    def _sums(self, task: Task, share: SeenShare, part: int) -> list[Operation]:
        heads = self._kv[part].heads
        sums: list[Operation] = []
        for kind in GRADIENTS:
            name, end = f"{kind}.{part}", self.head_group.local(kind)
            buffers = (self._own_partial(share, name), f"{name}.in")
            for stretch, summands in share.sums:
                inputs = tuple([self._summand(buffers, one, stretch) for one in summands])
                output = Piece(end, *stretch, heads)
                sums.append(Merge(task.at("sum"), MergeRule.SUM, inputs, (output,)))
        return sums

    def _summand(self, buffers: tuple[str, str], one: Summand, stretch: tuple[int, int]) -> Piece:
        shift = one.row - one.start
        return self._piece(buffers[one.arrives], stretch[0] + shift, stretch[1] + shift)

    # Buffers; those that a rank does not use are left out of its program.

    def _buffers(self, share: SeenShare) -> dict[str, Buffer]:
        made = (self._of_slice(share, part) for part in range(len(self._slices)))
        return {buffer.name: buffer for buffers in made for buffer in buffers}

    def _of_slice(self, share: SeenShare, part: int) -> Iterable[Buffer]:
        own = self.head_group.rows(Kind.Q, share.rank)
        q, kv, wide = self._q[part], self._kv[part], Precision.ACCUMULATE
        for kind in KEYS:
            yield self._buffer(f"{kind}.{part}", kind, share.rows, kv)
        if self.direction is Direction.FORWARD:
            for kind in (Kind.OUT, Kind.LSE):
                yield self._buffer(f"{kind}.{part}", kind, own, q, wide)
            return
        yield self._buffer(f"{Kind.GRAD_Q}.{part}", Kind.GRAD_Q, own, q, wide)
        for kind in GRADIENTS:
            name = f"{kind}.{part}"
            yield self._buffer(name, kind, share.rows, kv, wide)
            if self._own_partial(share, name) != name:
                yield self._buffer(f"{name}.wire", kind, share.rows, kv)
            yield self._buffer(f"{name}.in", kind, share.stack, kv)

    def _buffer(
        self, name: str, kind: Kind, rows: Spans, chunk: Chunk, precision: Precision | None = None
    ) -> Buffer:
        heads = chunk.heads or self.head_group.heads(kind)
        return Buffer(name, kind, rows, heads, precision or kind.precision)


def _pieces(
    buffers: tuple[str, ...], stretches: Stretches, heads: tuple[int, int] | None
) -> tuple[Piece, ...]:
    return tuple(Piece(name, *stretch, heads) for name in buffers for stretch in stretches)
