"""From a method on its head groups to a pass: programs with exchanges and frees.

A method gives, for every unit of every head group, its operations and buffers (`GroupPass`).
`with_exchanges` turns them into programs: it adds the caller's tensors, delta where it is used, the
exchanges where units work on rows of other ranks (`exchange.py`), and frees after the last use.
Every builder ends here; nothing here knows which method it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction, Pass, Programs
from mesh_attention.plan.language.program import Attention, Free, Operation, Program, Task
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.exchange import TO_HEADS, TO_TOKENS, exchange_of
from mesh_attention.plan.methods.parts.head_group import HeadGroup, ulysses_degrees

# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1
_CALLER = (Role.INPUT, Role.OUTPUT)
# Which buffers a program uses, and what it frees before which operation.
_Ends = tuple[Set[str], list[tuple[int, Free]]]


class Unit(NamedTuple):
    """What one unit does, and the buffers that it may use. A task among the operations is an
    exchange of a chunk."""

    operations: Sequence[Operation | Task]
    buffers: Mapping[str, Buffer]


@dataclass(frozen=True)
class GroupPass:
    """One pass of a method on its head groups, of which `head_group` is the first. `unit(u, index)`
    is unit u of a head group; its operations name the unit's own rows by `head_group.local(kind)`.
    Where head groups are cut, the operations and the steps say where chunks come and go."""

    head_group: HeadGroup
    direction: Direction
    needs: tuple[Kind, ...]  # the tensors it reads: with DELTA among them, delta is computed first
    groups: Mapping[str, tuple[int, ...]]  # of units, the same on all head groups
    steps: tuple[Step, ...]
    setting: dict[str, str]
    unit: Callable[[int, int], Unit]
    # For how many attentions buffers are kept after their last use: transfers into other memory
    # then need not wait.
    hold: int = 0
    keeps_gathered: bool = False  # rows that it gathers stay for the backward pass


def with_exchanges(made: GroupPass) -> Pass:
    """The pass of all ranks."""
    head_group, degree = made.head_group, made.head_group.degree
    # A unit alone has no groups.
    groups = head_group.on_all(made.groups) if head_group.num_units > 1 else {}
    exchange = exchange_of(head_group, made.direction, made.needs)
    groups.update(exchange.groups())
    assembler = Assembler(made.hold)

    def program(rank: int) -> Program:
        unit, index = divmod(rank, degree)
        inside = made.unit(unit, index)
        operations = [*exchange.before(unit, index)]
        for op in inside.operations:
            operations += exchange.operations(op, unit, index) if isinstance(op, Task) else (op,)
        operations += exchange.after(unit, index)
        buffers = {**exchange.buffers(unit, index), **inside.buffers}
        return assembler.program(rank, operations, buffers)

    steps = made.steps
    setting = made.setting | ({"ulysses": str(degree)} if degree > 1 else {})
    if head_group.is_exchanged and head_group.cut is None:
        steps = (Step(TO_HEADS, ()), *steps, Step(TO_TOKENS, ()))
    if head_group.shards is not None:
        setting["relayout"] = "on"
    kept = [kind.value for kind in head_group.kept if head_group.is_exchanged]
    if kept or made.keeps_gathered:
        setting["keep"] = " ".join([*kept, *["gathered"] * made.keeps_gathered])
    programs = Programs(degree * head_group.num_units, program)
    # Whether all head groups have the same number of heads, and receive the same bytes.
    alike = head_group.shards is None and degree in ulysses_degrees(head_group.problem)
    copies = degree if alike else 1
    return Pass(made.direction, groups, programs, Schedule(steps), setting, copies)


class Assembler:
    """Makes the programs of a pass. A buffer name has one role in all of them.

    A workspace buffer is freed right after the last operation on it, or `hold` attentions later.
    Where frees belong follows from the names that the operations touch; ranks that touch the same
    names share the answer, and the Free operations.
    """

    def __init__(self, hold: int = 0) -> None:
        self._hold = hold
        self._ends: dict[tuple[tuple[tuple[str, ...], ...], tuple[int, ...]], _Ends] = {}
        self._free = cache(Free)

    def program(
        self, rank: int, operations: Sequence[Operation], buffers: Mapping[str, Buffer]
    ) -> Program:
        names = tuple(op.touched for op in operations)
        attentions: list[int] = []
        if self._hold:
            attentions += [at for at, op in enumerate(operations) if isinstance(op, Attention)]
        key = (names, tuple(attentions))
        ends = self._ends.get(key)
        if ends is None:
            ends = self._ends[key] = self._find_ends(names, attentions, buffers)
        program: list[Operation] = []
        start = 0
        used, frees = ends
        for stop, free in frees:
            program += operations[start:stop]
            program.append(free)
            start = stop
        program += operations[start:]
        # Inputs and outputs always, others only where this rank uses them.
        held = (b for b in buffers.values() if b.name in used or b.role in _CALLER)
        return Program(rank, tuple(held), tuple(program))

    def _find_ends(
        self,
        names: Sequence[Sequence[str]],
        attentions: Sequence[int],
        buffers: Mapping[str, Buffer],
    ) -> _Ends:
        last_use = {name: at for at, touched in enumerate(names) for name in touched}
        ending: dict[int, list[str]] = {}
        for name, at in last_use.items():
            if buffers[name].role is Role.WORKSPACE:
                if self._hold:
                    later = bisect_right(attentions, at) + self._hold - 1
                    at = attentions[later] if later < len(attentions) else len(names) - 1
                ending.setdefault(at + 1, []).append(name)
        frees = [(stop, self._free(tuple(ending[stop]))) for stop in sorted(ending)]
        return last_use.keys(), frees
