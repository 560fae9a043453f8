"""From a method on its head groups to a pass, with the exchanges around it.

A method gives, for every unit of a head group, its operations and buffers. Here they become
programs: the caller's tensors, delta where it is used, the all-to-alls where units work on rows of
other ranks (the tokens of Ulysses, shards that lie otherwise: `exchanged_rows.py`), and frees. All
is exchanged at once, before the first operation and after the last, or, where the head group is
cut, portion by portion where the method says. Nothing here knows which method it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from mesh_attention.plan.language.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.language.plan import Direction, Pass, Programs
from mesh_attention.plan.language.program import (
    AllToAll,
    Merge,
    MergeRule,
    Operation,
    Program,
    Task,
)
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.assemble import Assembler
from mesh_attention.plan.methods.parts.exchange_chunks import Portions
from mesh_attention.plan.methods.parts.exchanged_rows import (
    Cuts,
    ExchangedRows,
    RelayoutRows,
    UnitRows,
)
from mesh_attention.plan.methods.parts.head_group import HeadGroup, PassCut
from mesh_attention.plan.methods.parts.kv_replicas import Holders
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

TO_HEADS, TO_TOKENS = Task("EX-IN", (0,)), Task("EX-OUT", (0,))
Pieces = tuple[tuple[Piece, ...], ...]  # for each member of a group
_KEPT = 16  # ranks whose exchanges are kept for the next mask: in training there is one


def caller_kinds(direction: Direction) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """Inputs and outputs of a pass."""
    if direction is Direction.FORWARD:
        return (Kind.Q, Kind.K, Kind.V), (Kind.OUT, Kind.LSE)
    inputs = (Kind.Q, Kind.K, Kind.V, Kind.OUT, Kind.LSE, Kind.GRAD_OUT)
    return inputs, (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V)


class Unit(NamedTuple):
    """What one unit does, and the buffers it does it on (some may be unused). A task among the
    operations is an exchange of a portion (`portions.py`)."""

    operations: Sequence[Operation | Task]
    buffers: Mapping[str, Buffer]


class UnitBuilder(Protocol):
    """A method on one head group. Its operations name the unit's own rows by
    `head_group.local(kind)`."""

    head_group: HeadGroup
    direction: Direction
    needs: tuple[Kind, ...]  # the tensors it reads: with DELTA among them, delta is computed first
    # Where the head group is cut, the method says in its operations and schedule where portions
    # come and go.
    hold: int  # for how many attentions buffers are kept beyond their last use, so that transfers
    # into other memory need not wait for them

    @property
    def schedule(self) -> Schedule: ...

    @property
    def setting(self) -> dict[str, str]: ...

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Of units, alike on all head groups."""
        ...

    def unit(self, unit: int) -> Unit: ...


def with_exchanges(builders: Sequence[UnitBuilder]) -> Pass:
    """One pass from a method on each of its head groups, in order of their index."""
    first = builders[0]
    degree = first.head_group.degree
    # A unit alone has nobody to talk to.
    groups = first.head_group.on_all(first.groups()) if first.head_group.num_units > 1 else {}
    around = _around(first)
    groups.update(around.groups())
    assembler = Assembler(first.hold)

    def program(rank: int) -> Program:
        unit, index = divmod(rank, degree)
        made = builders[index].unit(unit)
        operations = [*around.before(unit, index)]
        for op in made.operations:
            operations += around.portion(op, unit, index) if isinstance(op, Task) else (op,)
        operations += around.after(unit, index)
        buffers = {**around.buffers(unit, index), **made.buffers}
        return assembler.program(rank, operations, buffers)

    order = first.schedule
    setting = first.setting | ({"ulysses": str(degree)} if degree > 1 else {})
    if first.head_group.is_exchanged and first.head_group.cut is None:
        order = Schedule((Step(TO_HEADS, ()), *order.steps, Step(TO_TOKENS, ())))
    if first.head_group.shards is not None:
        setting["relayout"] = "on"
    programs = Programs(degree * first.head_group.num_units, program)
    copies = degree if first.head_group.has_alike else 1
    return Pass(first.direction, groups, programs, order, setting, copies)


def _around(inner: UnitBuilder) -> _Exchange:
    """An exchange does not depend on the mask: that of a new mask is the same again."""
    group = inner.head_group
    problem = replace(group.problem, mask=Mask())
    layouts = group.q_layout, group.kv_layout
    shares = group.degree, group.shards, group.cut
    return _exchange(problem, *layouts, *shares, inner.direction, inner.needs)


@lru_cache(maxsize=8)
def _exchange(
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    degree: int,
    shards: tuple[Layout, Layout] | None,
    cut: PassCut | None,
    direction: Direction,
    needs: tuple[Kind, ...],
) -> _Exchange:
    layouts = q_layout, kv_layout
    groups = [HeadGroup(problem, *layouts, degree, index, shards, cut) for index in range(degree)]
    return _Exchange(groups, direction, needs)


class _Exchange:
    """What stands around a method: caller's tensors, delta, and rows that are exchanged."""

    def __init__(
        self, head_groups: list[HeadGroup], direction: Direction, needs: tuple[Kind, ...]
    ) -> None:
        self._head_groups = head_groups
        first = self._first = head_groups[0]
        self._rows: ExchangedRows = (
            UnitRows(first) if first.shards is None else RelayoutRows(first, first.shards)
        )
        self._shards = first.shards or (first.q_layout, first.kv_layout)
        self.groups = self._rows.groups
        self._needs = needs
        self._inputs, self._outputs = caller_kinds(direction)
        self._delta = Kind.DELTA in needs
        self._holders = Holders(head_groups)
        self._portions: Portions | None = None
        if head_groups[0].cut is not None:
            self._portions = Portions(head_groups, direction, needs, self._outputs, self._holders)
        self._whole = first.is_exchanged and self._portions is None
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
        if self._first.is_exchanged:
            for kind in (*self._needs, *self._outputs):
                local = head_group.local_buffers(kind, unit, Role.WORKSPACE)
                made.update((buffer.name, buffer) for buffer in local)
            for kind in self._outputs:
                rows = made[kind.value].rows
                for copy, heads in enumerate(self._holders.copies if kind.is_key_side else ()):
                    name = f"{kind.value}.copy{copy}"
                    made[name] = Buffer(name, kind, rows, heads, kind.precision)
        return made

    def _caller_buffer(self, rank: int, kind: Kind, role: Role) -> Buffer:
        problem = self._first.problem
        heads = problem.kv_heads if kind.is_key_side else problem.num_heads
        rows = self._rows.shard(kind.is_key_side, rank)
        return Buffer(kind.value, kind, rows, (0, heads), kind.precision, role)

    def _slots(self, kind: Kind) -> int:
        """Rows of a shard."""
        return self._shards[kind.is_key_side].slots

    def before(self, unit: int, index: int) -> list[Operation]:
        return self._before(unit, index) if self._first.is_exchanged else self._before(0, 0)

    def _make_before(self, unit: int, index: int) -> list[Operation]:
        operations: list[Operation] = []
        if self._delta:
            out, grad, delta = (
                Piece(kind.value, 0, self._slots(kind))
                for kind in (Kind.OUT, Kind.GRAD_OUT, Kind.DELTA)
            )
            operations.append(Merge(Task("delta"), MergeRule.DELTA, (out, grad), (delta,)))
        if self._whole:
            operations += self._empty(unit, index)
            sends = self._tokens_of(*self._rows.given(unit, index))
            receives = self._own_heads(self._needs, unit, index)
            operations.append(AllToAll(TO_HEADS, self._rows.group(unit), sends, receives))
        return operations

    def _empty(self, unit: int, index: int) -> list[Operation]:
        """Rows that no shard has are padding, and must hold what padding holds."""
        cuts, local = self._rows.unfilled(unit), self._head_groups[index].local
        return [
            Merge(
                *(TO_HEADS.at("empty"), MergeRule.LSE if kind is Kind.LSE else MergeRule.SUM, ()),
                outputs=(Piece(local(kind), a, b),),
            )
            for kind in self._needs
            for a, b in cuts[kind.is_key_side]
        ]

    def portion(self, task: Task, unit: int, index: int) -> list[Operation]:
        assert self._portions is not None, "a method names portions of what is exchanged at once"
        return self._portions.operations(task, unit, index)

    def _make_after(self, unit: int, index: int) -> list[Operation]:
        if not self._whole:
            return []
        sends = self._own_heads(self._outputs, unit, index, parted=True)
        receives = self._results_of(*self._rows.given(unit, index))
        operations: list[Operation] = [AllToAll(TO_TOKENS, self._rows.group(unit), sends, receives)]
        for kind in self._outputs:
            slots = self._slots(kind)
            for total, copies in self._holders.sums if kind.is_key_side else ():
                parts = tuple(
                    Piece(f"{kind.value}.copy{copy}", 0, slots, heads)
                    for copy, heads in enumerate(copies)
                )
                end = Piece(kind.value, 0, slots, total)
                operations.append(Merge(TO_TOKENS.at("sum"), MergeRule.SUM, parts, (end,)))
        return operations

    def _make_tokens(self, *given: Cuts) -> Pieces:
        """For each member the rows that its unit works on, its heads of them."""
        named = [(kind.value, kind.is_key_side) for kind in self._needs]
        heads = [(group.heads(Kind.Q), group.heads(Kind.K)) for group in self._head_groups]
        return tuple(
            tuple(
                [
                    Piece(name, a, b, heads[index][side])
                    for name, side in named
                    for a, b in cuts[side]
                ]
            )
            for index, cuts in zip(self._rows.indices, given, strict=True)
        )

    def _make_results(self, *given: Cuts) -> Pieces:
        """Where a rank's rows come back from each member."""
        named = [(kind.value, kind.is_key_side) for kind in self._outputs]
        parts = [self._holders.parts(group) for group in self._head_groups]
        return tuple(
            tuple(
                [
                    Piece(f"{name}{copy}", a, b, heads)
                    for name, side in named
                    for a, b in cuts[side]
                    for copy, heads, _ in parts[index][side]
                ]
            )
            for index, cuts in zip(self._rows.indices, given, strict=True)
        )

    def _own_heads(
        self, kinds: tuple[Kind, ...], unit: int, index: int, *, parted: bool = False
    ) -> Pieces:
        """This head group's heads, for each member its tokens of them; `parted` where other head
        groups hold some of them as well."""
        group = self._head_groups[index]
        parts = self._holders.parts(group)
        sources = [
            (
                group.local(kind),
                kind.is_key_side,
                [part.here for part in parts[kind.is_key_side]] if parted else [None],
            )
            for kind in kinds
        ]
        return tuple(
            tuple(
                [
                    Piece(name, a, b, heads)
                    for name, side, parts_of in sources
                    for a, b in cuts[side]
                    for heads in parts_of
                ]
            )
            for cuts in self._rows.held(unit)
        )
