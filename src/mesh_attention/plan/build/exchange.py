"""From a method on its head groups to a pass, with the exchange of tokens for heads around it.

A method gives, for every unit of a head group, its operations and buffers. Here they become
programs: the caller's tensors, delta where it is used, the all-to-alls of Ulysses where the degree
is above one, and frees. Nothing here knows which method it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.build.assemble import Assembler
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.plan import Direction, Pass, Programs
from mesh_attention.plan.program import AllToAll, Merge, MergeRule, Operation, Program, Task
from mesh_attention.plan.schedule.tasks import Schedule, Step

TO_HEADS, TO_TOKENS = Task("EX-IN", (0,)), Task("EX-OUT", (0,))


def caller_kinds(direction: Direction) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """Inputs and outputs of a pass."""
    if direction is Direction.FORWARD:
        return (Kind.Q, Kind.K, Kind.V), (Kind.OUT, Kind.LSE)
    inputs = (Kind.Q, Kind.K, Kind.V, Kind.OUT, Kind.LSE, Kind.GRAD_OUT)
    return inputs, (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V)


class Unit(NamedTuple):
    """What one unit does, and the buffers it does it on (some may be unused)."""

    operations: Sequence[Operation]
    buffers: Mapping[str, Buffer]


class UnitBuilder(Protocol):
    """A method on one head group. Its operations name the unit's own rows by
    `head_group.local(kind)`."""

    head_group: HeadGroup
    direction: Direction
    needs: tuple[Kind, ...]  # the tensors it reads: with DELTA among them, delta is computed first
    hold: int  # for how many attentions buffers are kept beyond their last use, so that transfers
    # into other memory need not wait for them

    @property
    def schedule(self) -> Schedule: ...

    @property
    def setting(self) -> dict[str, str]: ...

    def groups(self) -> dict[str, tuple[int, ...]]: ...

    def unit(self, unit: int) -> Unit: ...


def with_exchanges(builders: Sequence[UnitBuilder]) -> Pass:
    """One pass from a method on each of its head groups, in order of their index."""
    first = builders[0]
    degree = first.head_group.degree
    groups: dict[str, tuple[int, ...]] = {}
    for builder in builders:
        groups.update(builder.groups())
    if degree > 1:
        for unit in range(first.head_group.num_units):
            groups[f"U{unit}"] = tuple(range(unit * degree, (unit + 1) * degree))
    around = _Exchange([builder.head_group for builder in builders], first)
    assembler = Assembler(first.hold)

    def program(rank: int) -> Program:
        unit, index = divmod(rank, degree)
        made = builders[index].unit(unit)
        operations = [*around.before(unit, index), *made.operations, *around.after(unit, index)]
        buffers = {**around.buffers(unit, index), **made.buffers}
        return assembler.program(rank, operations, buffers)

    order = first.schedule
    if degree > 1:
        order = Schedule((Step(TO_HEADS, ()), *order.steps, Step(TO_TOKENS, ())))
    setting = first.setting | ({"ulysses": str(degree)} if degree > 1 else {})
    programs = Programs(degree * first.head_group.num_units, program)
    return Pass(first.direction, groups, programs, order, setting)


class _Exchange:
    """What stands around a method: caller's tensors, delta, and tokens exchanged for heads."""

    def __init__(self, head_groups: list[HeadGroup], inner: UnitBuilder) -> None:
        self._head_groups = head_groups
        self._degree = head_groups[0].degree
        self._needs = inner.needs
        self._inputs, self._outputs = caller_kinds(inner.direction)
        self._delta = Kind.DELTA in inner.needs
        self._shared: dict[tuple[object, ...], list[Operation]] = {}

    def buffers(self, unit: int, index: int) -> dict[str, Buffer]:
        head_group = self._head_groups[index]
        rank = head_group.rank_of(unit)
        roles = dict.fromkeys(self._inputs, Role.INPUT) | dict.fromkeys(self._outputs, Role.OUTPUT)
        if self._delta:
            roles[Kind.DELTA] = Role.WORKSPACE
        made = {kind.value: self._caller_buffer(rank, kind, role) for kind, role in roles.items()}
        if self._degree > 1:
            for kind in (*self._needs, *self._outputs):
                made[head_group.local(kind)] = head_group.local_buffer(kind, unit, Role.WORKSPACE)
            for kind in self._outputs:
                for copy in range(self._copies(kind) if self._copies(kind) > 1 else 0):
                    whole = self._caller_buffer(rank, kind, Role.WORKSPACE)
                    name = f"{kind.value}.copy{copy}"
                    made[name] = Buffer(name, kind, whole.rows, whole.heads, whole.precision)
        return made

    def _caller_buffer(self, rank: int, kind: Kind, role: Role) -> Buffer:
        head_group = self._head_groups[0]
        slots = head_group.layout(kind).slots
        heads = head_group.problem.kv_heads if kind.is_key_side else head_group.problem.num_heads
        rows = ((rank * slots, (rank + 1) * slots),)
        return Buffer(kind.value, kind, rows, (0, heads), kind.precision, role)

    def before(self, unit: int, index: int) -> list[Operation]:
        key = ("before", unit, index) if self._degree > 1 else ("before",)
        if key not in self._shared:
            operations: list[Operation] = []
            if self._delta:
                slots = self._head_groups[0].q_layout.slots
                out, grad, delta = (
                    Piece(kind.value, 0, slots) for kind in (Kind.OUT, Kind.GRAD_OUT, Kind.DELTA)
                )
                operations.append(Merge(Task("delta"), MergeRule.DELTA, (out, grad), (delta,)))
            if self._degree > 1:
                # Each member gets its slice of heads of this rank's tokens.
                sends = self._own_tokens(self._needs, lambda kind, _: kind.value, unit, index)
                receives = self._own_heads(self._needs, unit, index)
                operations.append(AllToAll(TO_HEADS, f"U{unit}", sends, receives))
            self._shared[key] = operations
        return self._shared[key]

    def after(self, unit: int, index: int) -> list[Operation]:
        if self._degree == 1:
            return []
        key = ("after", unit, index)
        if key not in self._shared:
            # Each member gets its own tokens of this head group's heads back.
            receives = self._own_tokens(self._outputs, self._landing, unit, index)
            sends = self._own_heads(self._outputs, unit, index)
            operations: list[Operation] = [AllToAll(TO_TOKENS, f"U{unit}", sends, receives)]
            for kind in self._outputs:
                copies, slots = self._copies(kind), self._head_groups[0].layout(kind).slots
                if copies > 1:
                    parts = tuple(Piece(f"{kind.value}.copy{c}", 0, slots) for c in range(copies))
                    end = Piece(kind.value, 0, slots)
                    operations.append(Merge(TO_TOKENS.at("sum"), MergeRule.SUM, parts, (end,)))
            self._shared[key] = operations
        return self._shared[key]

    def _copies(self, kind: Kind) -> int:
        """How many head groups hold each head: above one where there are fewer KV heads."""
        if not kind.is_key_side:
            return 1
        return max(1, self._degree // self._head_groups[0].problem.kv_heads)

    def _own_tokens(
        self, kinds: tuple[Kind, ...], name: Callable[[Kind, HeadGroup], str], unit: int, index: int
    ) -> tuple[tuple[Piece, ...], ...]:
        """This rank's tokens, for each head group its heads of them."""
        rank = self._head_groups[index].rank_of(unit)
        return tuple(
            tuple(
                Piece(name(kind, group), a, b, group.heads(kind))
                for kind in kinds
                for a, b in group.layout(kind).parts(rank)
            )
            for group in self._head_groups
        )

    def _own_heads(
        self, kinds: tuple[Kind, ...], unit: int, index: int
    ) -> tuple[tuple[Piece, ...], ...]:
        """This head group's heads, for each member of the unit its tokens of them."""
        group = self._head_groups[index]
        rows = [(group.local(kind), group.member_rows(kind, unit)) for kind in kinds]
        return tuple(
            tuple(Piece(name, a, b) for name, of in rows for a, b in of[member])
            for member in range(self._degree)
        )

    def _landing(self, kind: Kind, source: HeadGroup) -> str:
        copies = self._copies(kind)
        return kind.value if copies == 1 else f"{kind.value}.copy{source.index % copies}"
