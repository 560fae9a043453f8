"""From tasks to a program: fragments in schedule order, buffers, and frees after the last use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from mesh_attention.plan.buffers import Buffer, Role
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Free,
    Operation,
    Program,
    reads,
    writes,
)

__all__ = ["assemble", "touched"]


def touched(op: Operation) -> list[str]:
    """Names of the buffers an operation reads or writes, each once, in order."""
    names = dict.fromkeys(piece.buffer for piece in reads(op))
    names.update(dict.fromkeys(piece.buffer for piece in writes(op)))
    return list(names)


def assemble(
    rank: int,
    operations: Sequence[Operation],
    buffers: Mapping[str, Buffer],
    touches: Mapping[int, Sequence[str]],
    frees: dict[tuple[str, ...], Free],
    *,
    hold: int = 0,
) -> Program:
    """A program that frees every workspace buffer right after the last operation that touches it,
    or `hold` attentions later: a transfer into memory of its own need not wait for them.

    `touches` holds `touched(op)` by `id(op)`: operations are shared between ranks, so each is
    looked at once. `frees` collects the Free operations, which ranks share as well.
    """
    last_use: dict[str, int] = {}
    for at, op in enumerate(operations):
        for name in touches[id(op)]:
            last_use[name] = at
    attentions = [i for i, op in enumerate(operations) if isinstance(op, Attend | AttendBackward)]
    ending: dict[int, list[str]] = {}
    for name, at in last_use.items():
        if buffers[name].role is Role.WORKSPACE:
            if hold:
                later = bisect_right(attentions, at) + hold - 1
                at = attentions[later] if later < len(attentions) else len(operations) - 1
            ending.setdefault(at, []).append(name)
    program: list[Operation] = []
    for at, op in enumerate(operations):
        program.append(op)
        if at in ending:
            names = tuple(ending[at])
            program.append(frees.setdefault(names, Free(names)))
    used = _in_order(buffers.values(), last_use)
    return Program(rank, tuple(used), tuple(program))


def _in_order(buffers: Iterable[Buffer], used: Mapping[str, int]) -> Iterable[Buffer]:
    """Inputs and outputs always, workspace only where this rank uses it."""
    return (b for b in buffers if b.role is not Role.WORKSPACE or b.name in used)
