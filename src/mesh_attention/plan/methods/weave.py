"""From strands to a pass: programs of all ranks, with the exchange of tokens for heads around them.

A method gives, for every unit of a strand, its operations and buffers. Here they become programs:
the caller's tensors, delta where it is used, the all-to-alls of Ulysses where the degree is above
one, and frees. Nothing here knows which method it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from mesh_attention.plan.assemble import Assembler
from mesh_attention.plan.buffers import Buffer, Kind, Piece, Precision, Role
from mesh_attention.plan.methods.strand import Strand
from mesh_attention.plan.plan import Direction, Pass
from mesh_attention.plan.program import AllToAll, Merge, MergeRule, Operation, Program
from mesh_attention.plan.schedule.tasks import Schedule, Step

__all__ = ["Inner", "caller_kinds", "weave"]

SCATTER, RETURN = "A2A-IN-0", "A2A-OUT-0"


def caller_kinds(direction: Direction) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """Inputs and outputs of a pass."""
    if direction is Direction.FORWARD:
        return (Kind.Q, Kind.K, Kind.V), (Kind.OUT, Kind.LSE)
    inputs = (Kind.Q, Kind.K, Kind.V, Kind.OUT, Kind.LSE, Kind.GRAD_OUT)
    return inputs, (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V)


class Inner(Protocol):
    """A method on one strand. Its operations name the unit's own rows by `strand.local(kind)`."""

    @property
    def strand(self) -> Strand: ...

    @property
    def direction(self) -> Direction: ...

    @property
    def needs(self) -> tuple[Kind, ...]:
        """The tensors it reads: with DELTA among them, delta is computed first."""
        ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def setting(self) -> dict[str, str]: ...

    @property
    def hold(self) -> int:
        """For how many attentions buffers are kept beyond their last use, so that transfers into
        other memory need not wait for them."""
        ...

    def groups(self) -> dict[str, tuple[int, ...]]: ...

    def unit_operations(self, unit: int) -> Sequence[Operation]: ...

    def unit_buffers(self, unit: int) -> Mapping[str, Buffer]: ...


def weave(strands: Sequence[Inner]) -> Pass:
    """One pass from the strands of a method, in order of their index."""
    first = strands[0]
    degree = first.strand.degree
    groups: dict[str, tuple[int, ...]] = {}
    for inner in strands:
        groups.update(inner.groups())
    if degree > 1:
        for unit in range(first.strand.num_units):
            groups[f"U{unit}"] = tuple(range(unit * degree, (unit + 1) * degree))
    swap = _Swap([inner.strand for inner in strands], first)
    assembler = Assembler(first.hold)
    programs: list[Program] = []
    for rank in range(degree * first.strand.num_units):
        unit, index = divmod(rank, degree)
        inner = strands[index]
        operations = [
            *swap.before(unit, index),
            *inner.unit_operations(unit),
            *swap.after(unit, index),
        ]
        buffers = {**swap.buffers(unit, index), **inner.unit_buffers(unit)}
        programs.append(assembler.program(rank, operations, buffers))
    schedule = _present(first.schedule, programs)
    if degree > 1:
        schedule = Schedule((Step(SCATTER, ()), *schedule.steps, Step(RETURN, ())))
    setting = first.setting | ({"ulysses": str(degree)} if degree > 1 else {})
    return Pass(first.direction, groups, tuple(programs), schedule, setting)


def _present(schedule: Schedule, programs: Sequence[Program]) -> Schedule:
    """The schedule without tasks that are empty on every rank."""
    used = {op.name for program in programs for op in program.operations}
    names = {name.partition(".")[0] for name in used}
    steps = []
    for step in schedule.steps:
        compute = tuple(task for task in step.compute if task in names)
        communication = step.communication if step.communication in names else None
        if communication or compute:
            steps.append(Step(communication, compute))
    return Schedule(tuple(steps))


class _Swap:
    """What stands around a method: caller's tensors, delta, and the swap of tokens for heads."""

    def __init__(self, strands: list[Strand], inner: Inner) -> None:
        self._strands = strands
        self._degree = strands[0].degree
        self._needs = inner.needs
        self._inputs, self._outputs = caller_kinds(inner.direction)
        self._delta = Kind.DELTA in inner.needs
        self._shared: dict[tuple[object, ...], list[Operation]] = {}

    def buffers(self, unit: int, index: int) -> dict[str, Buffer]:
        strand = self._strands[index]
        rank = strand.rank_of(unit)
        roles = dict.fromkeys(self._inputs, Role.INPUT) | dict.fromkeys(self._outputs, Role.OUTPUT)
        if self._delta:
            roles[Kind.DELTA] = Role.WORKSPACE
        made = {kind.value: self._caller_buffer(rank, kind, role) for kind, role in roles.items()}
        if self._degree > 1:
            for kind in (*self._needs, *self._outputs):
                made[strand.local(kind)] = strand.local_buffer(kind, unit, Role.WORKSPACE)
            for kind in self._outputs:
                for copy in range(self._copies(kind) if self._copies(kind) > 1 else 0):
                    whole = self._caller_buffer(rank, kind, Role.WORKSPACE)
                    name = f"{kind.value}.copy{copy}"
                    made[name] = Buffer(name, kind, whole.rows, whole.heads, whole.precision)
        return made

    def _caller_buffer(self, rank: int, kind: Kind, role: Role) -> Buffer:
        strand = self._strands[0]
        slots = strand.layout(kind).slots
        heads = strand.problem.kv_heads if kind.is_key_side else strand.problem.num_heads
        precision = Precision.ACCUMULATE if kind.is_statistic else Precision.ELEMENT
        rows = ((rank * slots, (rank + 1) * slots),)
        return Buffer(kind.value, kind, rows, (0, heads), precision, role)

    def before(self, unit: int, index: int) -> list[Operation]:
        key = ("before", unit, index) if self._degree > 1 else ("before",)
        if key not in self._shared:
            operations: list[Operation] = []
            if self._delta:
                slots = self._strands[0].q_layout.slots
                out, grad, delta = (
                    Piece(kind.value, 0, slots) for kind in (Kind.OUT, Kind.GRAD_OUT, Kind.DELTA)
                )
                operations.append(Merge("delta", MergeRule.DELTA, (out, grad), (delta,)))
            if self._degree > 1:
                operations.append(self._scatter(unit, index))
            self._shared[key] = operations
        return self._shared[key]

    def after(self, unit: int, index: int) -> list[Operation]:
        if self._degree == 1:
            return []
        key = ("after", unit, index)
        if key not in self._shared:
            operations: list[Operation] = [self._gather_back(unit, index)]
            for kind in self._outputs:
                copies, slots = self._copies(kind), self._strands[0].layout(kind).slots
                if copies > 1:
                    parts = tuple(Piece(f"{kind.value}.copy{c}", 0, slots) for c in range(copies))
                    end = Piece(kind.value, 0, slots)
                    operations.append(Merge(f"{RETURN}.sum", MergeRule.SUM, parts, (end,)))
            self._shared[key] = operations
        return self._shared[key]

    def _copies(self, kind: Kind) -> int:
        """How many strands hold each head: above one where KV heads are fewer than strands."""
        if not kind.is_key_side:
            return 1
        return max(1, self._degree // self._strands[0].problem.kv_heads)

    def _stretches(self, kind: Kind) -> list[tuple[int, int]]:
        return list(pairwise(self._strands[0].layout(kind).halves))

    def _scatter(self, unit: int, index: int) -> AllToAll:
        """Each member gets its slice of heads of this rank's tokens."""
        strand = self._strands[index]
        sends = tuple(
            tuple(
                Piece(kind.value, a, b, to.heads(kind))
                for kind in self._needs
                for a, b in self._stretches(kind)
            )
            for to in self._strands
        )
        receives = tuple(
            tuple(
                Piece(strand.local(kind), a, b)
                for kind in self._needs
                for a, b in strand.member_rows(kind, member)
            )
            for member in range(self._degree)
        )
        return AllToAll(SCATTER, f"U{unit}", sends, receives)

    def _gather_back(self, unit: int, index: int) -> AllToAll:
        """Each member gets its own tokens of this strand's heads back."""
        strand = self._strands[index]
        sends = tuple(
            tuple(
                Piece(strand.local(kind), a, b)
                for kind in self._outputs
                for a, b in strand.member_rows(kind, member)
            )
            for member in range(self._degree)
        )
        receives = tuple(
            tuple(
                Piece(self._landing(kind, source), a, b, source.heads(kind))
                for kind in self._outputs
                for a, b in self._stretches(kind)
            )
            for source in self._strands
        )
        return AllToAll(RETURN, f"U{unit}", sends, receives)

    def _landing(self, kind: Kind, source: Strand) -> str:
        copies = self._copies(kind)
        return kind.value if copies == 1 else f"{kind.value}.copy{source.index % copies}"
