"""From tasks to a program: fragments in schedule order, buffers, and frees after the last use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from functools import cache

from mesh_attention.plan.language.buffers import Buffer, Role
from mesh_attention.plan.language.program import Attention, Free, Operation, Program

# Which buffers a program uses, and what it frees before which operation.
_Ends = tuple[Set[str], list[tuple[int, Free]]]


class Assembler:
    """Makes the programs of a pass. A buffer name has one role in all of them.

    Where frees belong follows from the names that the operations touch, one after the other; ranks
    that touch the same names share the answer, and the Free operations.

    A workspace buffer is freed right after the last operation on it, or `hold` attentions later: a
    transfer that lands in other memory need not wait for them.
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
        # Inputs and outputs always, workspace only where this rank uses it.
        held = (b for b in buffers.values() if b.name in used or b.role is not Role.WORKSPACE)
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
