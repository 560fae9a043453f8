"""Names of the buffers that operations touch or write, each looked up once.

Ranks share most operations. Transfers, which name their partners, are each rank's own, but they
share their pieces. So names are remembered by identity: a ring of 256 has 590,000 operations in its
backward pass, and some 3,000 that differ in what they touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_attention.plan.program import Operation, SendRecv, reads, writes

__all__ = ["NamesOf", "touched", "written"]


def touched(op: Operation) -> list[str]:
    """Names of the buffers an operation reads or writes, each once, in order."""
    names = dict.fromkeys(piece.buffer for piece in reads(op))
    names.update(dict.fromkeys(piece.buffer for piece in writes(op)))
    return list(names)


def written(op: Operation) -> list[str]:
    return list(dict.fromkeys(piece.buffer for piece in writes(op)))


class NamesOf:
    """`names(op)`, remembered; equal answers are the same object."""

    def __init__(self, names: Callable[[Operation], Sequence[str]]) -> None:
        self._names = names
        self._known: dict[object, Sequence[str]] = {}
        self._equal: dict[tuple[str, ...], Sequence[str]] = {}
        self._kept: list[Operation] = []  # ids stay unique while the operations live

    def __call__(self, op: Operation) -> Sequence[str]:
        key = (id(op.sends), id(op.receives)) if isinstance(op, SendRecv) else id(op)
        found = self._known.get(key)
        if found is None:
            names = self._names(op)
            found = self._known[key] = self._equal.setdefault(tuple(names), names)
            self._kept.append(op)
        return found
