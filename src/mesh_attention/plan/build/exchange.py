"""From a method on its head groups to a pass, with the exchange of tokens for heads around it.

A method gives, for every unit of a head group, its operations and buffers. Here they become
programs: the caller's tensors, delta where it is used, the all-to-alls of Ulysses where the degree
is above one, and frees. Nothing here knows which method it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.build.assemble import Assembler
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.build.holders import Holders
from mesh_attention.plan.layout import Layout, Spans
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction, Pass, Programs
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import AllToAll, Merge, MergeRule, Operation, Program, Task
from mesh_attention.plan.schedule.tasks import Schedule, Step

TO_HEADS, TO_TOKENS = Task("EX-IN", (0,)), Task("EX-OUT", (0,))
Pieces = tuple[tuple[Piece, ...], ...]  # for each member of a unit
_KEPT = 16  # ranks whose exchanges are kept for the next mask: in training there is one


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
    # A unit alone has nobody to talk to: so a rank makes the builder of its own head group only.
    for builder in builders if first.head_group.num_units > 1 else ():
        groups.update(builder.groups())
    if degree > 1:
        for unit in range(first.head_group.num_units):
            groups[f"U{unit}"] = tuple(range(unit * degree, (unit + 1) * degree))
    around = _around(first)
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


def _around(inner: UnitBuilder) -> _Exchange:
    """An exchange does not depend on the mask: that of a new mask is the same again."""
    group = inner.head_group
    problem = replace(group.problem, mask=Mask())
    layouts = group.q_layout, group.kv_layout
    return _exchange(problem, *layouts, group.degree, inner.direction, inner.needs)


@lru_cache(maxsize=8)
def _exchange(
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    degree: int,
    direction: Direction,
    needs: tuple[Kind, ...],
) -> _Exchange:
    groups = [HeadGroup(problem, q_layout, kv_layout, degree, index) for index in range(degree)]
    return _Exchange(groups, direction, needs)


class _Exchange:
    """What stands around a method: caller's tensors, delta, and tokens exchanged for heads."""

    def __init__(
        self, head_groups: list[HeadGroup], direction: Direction, needs: tuple[Kind, ...]
    ) -> None:
        self._head_groups = head_groups
        self._degree = head_groups[0].degree
        self._needs = needs
        self._inputs, self._outputs = caller_kinds(direction)
        self._delta = Kind.DELTA in needs
        self._holders = Holders(head_groups)
        self._before = lru_cache(maxsize=_KEPT)(self._make_before)
        self.after = lru_cache(maxsize=_KEPT)(self._make_after)
        # The same for all ranks whose own rows are cut alike.
        self._tokens_of = lru_cache(maxsize=_KEPT)(self._make_tokens)
        self._results_of = lru_cache(maxsize=_KEPT)(self._make_results)

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
                rows = made[kind.value].rows
                for copy, heads in enumerate(self._holders.copies if kind.is_key_side else ()):
                    name = f"{kind.value}.copy{copy}"
                    made[name] = Buffer(name, kind, rows, heads, kind.precision)
        return made

    def _caller_buffer(self, rank: int, kind: Kind, role: Role) -> Buffer:
        head_group = self._head_groups[0]
        slots = head_group.layout(kind).slots
        heads = head_group.problem.kv_heads if kind.is_key_side else head_group.problem.num_heads
        rows = ((rank * slots, (rank + 1) * slots),)
        return Buffer(kind.value, kind, rows, (0, heads), kind.precision, role)

    def before(self, unit: int, index: int) -> list[Operation]:
        return self._before(unit, index) if self._degree > 1 else self._before(0, 0)

    def _make_before(self, unit: int, index: int) -> list[Operation]:
        operations: list[Operation] = []
        if self._delta:
            slots = self._head_groups[0].q_layout.slots
            out, grad, delta = (
                Piece(kind.value, 0, slots) for kind in (Kind.OUT, Kind.GRAD_OUT, Kind.DELTA)
            )
            operations.append(Merge(Task("delta"), MergeRule.DELTA, (out, grad), (delta,)))
        if self._degree > 1:
            sends = self._tokens_of(*self._cuts(unit, index))
            receives = self._own_heads(self._needs, unit, index)
            operations.append(AllToAll(TO_HEADS, f"U{unit}", sends, receives))
        return operations

    def _make_after(self, unit: int, index: int) -> list[Operation]:
        if self._degree == 1:
            return []
        sends = self._own_heads(self._outputs, unit, index, parted=True)
        receives = self._results_of(*self._cuts(unit, index))
        operations: list[Operation] = [AllToAll(TO_TOKENS, f"U{unit}", sends, receives)]
        for kind in self._outputs:
            slots = self._head_groups[0].layout(kind).slots
            for total, copies in self._holders.sums if kind.is_key_side else ():
                parts = tuple(
                    Piece(f"{kind.value}.copy{copy}", 0, slots, heads)
                    for copy, heads in enumerate(copies)
                )
                end = Piece(kind.value, 0, slots, total)
                operations.append(Merge(TO_TOKENS.at("sum"), MergeRule.SUM, parts, (end,)))
        return operations

    def _cuts(self, unit: int, index: int) -> tuple[Spans, Spans]:
        """The parts of a rank's own rows: of queries, and of keys."""
        group = self._head_groups[index]
        rank = group.rank_of(unit)
        return group.q_layout.parts(rank), group.kv_layout.parts(rank)

    def _make_tokens(self, *cuts: Spans) -> Pieces:
        """A rank's tokens, for each head group its heads of them."""
        named = [(kind.value, kind.is_key_side) for kind in self._needs]
        return tuple(
            tuple([Piece(name, a, b, heads[side]) for name, side in named for a, b in cuts[side]])
            for heads in ([group.heads(Kind.Q), group.heads(Kind.K)] for group in self._head_groups)
        )

    def _make_results(self, *cuts: Spans) -> Pieces:
        """Where a rank's tokens come back from each head group."""
        named = [(kind.value, kind.is_key_side) for kind in self._outputs]
        return tuple(
            tuple(
                [
                    Piece(f"{name}{copy}", a, b, heads)
                    for name, side in named
                    for a, b in cuts[side]
                    for copy, heads, _ in parts[side]
                ]
            )
            for parts in map(self._holders.parts, self._head_groups)
        )

    def _own_heads(
        self, kinds: tuple[Kind, ...], unit: int, index: int, *, parted: bool = False
    ) -> Pieces:
        """This head group's heads, for each member of the unit its tokens of them; `parted` where
        other head groups hold some of them as well."""
        group = self._head_groups[index]
        parts = self._holders.parts(group)
        sources = [
            (
                group.local(kind),
                group.member_rows(kind, unit),
                [part.here for part in parts[kind.is_key_side]] if parted else [None],
            )
            for kind in kinds
        ]
        return tuple(
            tuple(
                [
                    Piece(name, a, b, heads)
                    for name, rows, parts_of in sources
                    for a, b in rows[member]
                    for heads in parts_of
                ]
            )
            for member in range(self._degree)
        )
