"""Programs in which rows travel only to ranks that need them, slice by slice of heads.

A rank works on some query rows and some key rows: with a tile 1 x n on its own queries and the keys
that they see, with a tile a x b on those queries of its Q group that see keys of its tile column,
and the keys there that they see. Forward a slice is one all-to-all, one attention and, where
queries travel, an all-to-all that brings partial outputs to the owners of the rows. Backward it is
the same with gradients. Owners combine what arrives in wide precision. Where no rank needs a row of
another nothing is exchanged.
"""

from __future__ import annotations

from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import (
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    Operation,
    Task,
)
from mesh_attention.plan.language.tasks import Schedule, Step, follow_each_other
from mesh_attention.plan.methods.parts.exchange import Unit
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.needed_share import SeenShare
from mesh_attention.plan.methods.parts.needed_side import ByMember, SeenSide
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS

GATHER, COMPUTE = "AG-KV", "C"  # kinds of tasks
# The next transfer is often due while the attention before it still runs.
HOLD = 1


class SeenBuilder:
    """What `with_exchanges` asks of a method."""

    def __init__(
        self,
        head_group: HeadGroup,
        direction: Direction,
        q: SeenSide,
        kv: SeenSide,
        lowerings: Lowerings,
        slices: tuple[int, ...],
        tile: str,
        gathers: dict[object, AllToAll],
    ) -> None:
        """`gathers`: those made so far, by the pass that came before."""
        self.head_group = head_group
        self.direction = direction
        self._q, self._kv = q, kv
        self._sides = (q, kv)
        self.needs = (*q.inputs, *kv.inputs)
        self._gathers = q.travels or kv.travels
        # Queries that do not travel have their results at home.
        self._reduced = [side for side in self._sides if side.partials and side is not q]
        if q.travels:
            self._reduced.insert(0, q)
        self._reduces = any(side.travels for side in self._reduced)
        self._reduce_kind = "RS-Q" if direction is Direction.FORWARD else "RS-dKV"
        self.hold = HOLD if self._gathers else 0
        self._lowerings = lowerings
        self._slices = slices
        self._tile = tile
        self._known_gathers = gathers
        self.schedule = self._make_schedule()

    @property
    def setting(self) -> dict[str, str]:
        setting = {"tile": self._tile, "travels": "what is seen" if self._gathers else "nothing"}
        if len(self._slices) > 1:
            setting["head_slices"] = "+".join(map(str, self._slices))
        return setting

    def groups(self) -> dict[str, tuple[int, ...]]:
        return {ALL_UNITS: tuple(range(self.head_group.num_units))} if self._gathers else {}

    def _make_schedule(self) -> Schedule:
        def of_slice(part: int) -> Schedule:
            steps = [Step(Task(GATHER, (part,)), ())] if self._gathers else []
            steps.append(Step(None, (Task(COMPUTE, (part, part)),)))
            if self._reduced:
                steps.append(Step(Task(self._reduce_kind, (part,)), ()))
            return Schedule(tuple(steps))

        return follow_each_other([of_slice(part) for part in range(len(self._slices))])

    def unit(self, unit: int) -> Unit:
        q, kv = (side.shares(unit) for side in self._sides)
        calls = self._calls(q, kv)
        operations: list[Operation] = []
        later: list[Operation] = []  # merges stand behind the attention that hides their transfer
        for task in self.schedule.order():
            part = task.index[0]
            if task.kind == GATHER:
                operations.append(self._gather(task, unit, part))
            elif task.kind == COMPUTE:
                operations += [*self._attention(task, q, kv, part, calls), *later]
                later = []
            else:
                merges = [
                    op
                    for side in self._reduced
                    for op in side.merges(task.at(side.rule), side.shares(unit), part)
                ]
                operations += self._to_owners(task, unit, part) if self._reduces else merges
                later += merges if self._reduces else []
        buffers = (*self._q.buffers(q), *self._kv.buffers(kv))
        return Unit([*operations, *later], {buffer.name: buffer for buffer in buffers})

    def _calls(self, q: SeenShare, kv: SeenShare) -> tuple[Call, ...]:
        if not kv.rows:
            return ()
        queries = self._lowerings.queries(q.rows)
        return self._lowerings.calls(queries, self._lowerings.keys(kv.rows))

    def _gather(self, task: Task, unit: int, part: int) -> AllToAll:
        inputs = [side.inputs for side in self._sides if side.travels]
        key = (task, unit, self._slices, *inputs)  # both passes bring the same keys
        found = self._known_gathers.get(key)
        if found is None:
            shares = [(side, side.shares(unit)) for side in self._sides]
            sends = self._together([side.given(share, part) for side, share in shares])
            receives = self._together([side.gathered(share, part) for side, share in shares])
            found = self._known_gathers[key] = AllToAll(task, ALL_UNITS, sends, receives)
        return found

    def _to_owners(self, task: Task, unit: int, part: int) -> list[Operation]:
        """What others own of the partial results, and theirs of own rows."""
        shares = [(side, side.shares(unit)) for side in self._reduced]
        casts = [op for side, share in shares for op in side.to_wire(task, share, part)]
        sends = self._together([side.sent(share, part) for side, share in shares])
        receives = self._together([side.arriving(share, part) for side, share in shares])
        return [*casts, AllToAll(task, ALL_UNITS, sends, receives)]

    def _together(self, sides: list[ByMember]) -> tuple[tuple[Piece, ...], ...]:
        pieces: list[tuple[Piece, ...]] = [()] * self.head_group.num_units
        for side in sides:
            for member, more in side.items():
                pieces[member] += more
        return tuple(pieces)

    def _attention(
        self, task: Task, q: SeenShare, kv: SeenShare, part: int, calls: tuple[Call, ...]
    ) -> list[Operation]:
        operations: list[Operation] = []
        if kv.rows:
            forward = self.direction is Direction.FORWARD
            attend = self._attend if forward else self._gradients
            operations.append(attend(task, q, kv, part, calls))
        if not self._q.travels:
            end = task.at("copy" if q.rows else "empty")
            operations += self._q.merges(end, q, part)
        return operations

    def _attend(
        self, task: Task, q: SeenShare, kv: SeenShare, part: int, calls: tuple[Call, ...]
    ) -> Attend:
        queries = self._q.operand(q, Kind.Q, part)
        k, v = (self._kv.operand(kv, kind, part) for kind in self._kv.inputs)
        out, lse = self._q.sums(q, part)
        return Attend(task, queries, k, v, out, lse, calls, fresh=True)

    def _gradients(
        self, task: Task, q: SeenShare, kv: SeenShare, part: int, calls: tuple[Call, ...]
    ) -> AttendBackward:
        given = {kind: self._q.operand(q, kind, part) for kind in self._q.inputs}
        k, v = (self._kv.operand(kv, kind, part) for kind in self._kv.inputs)
        (grad_q,), (grad_k, grad_v) = self._q.sums(q, part), self._kv.sums(kv, part)
        return AttendBackward(
            *(task, given[Kind.Q], k, v, given[Kind.GRAD_OUT], given[Kind.LSE]),
            out=given.get(Kind.OUT),
            delta=given.get(Kind.DELTA),
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
            calls=calls,
            fresh_q=True,
            fresh_kv=True,
        )
