"""The most workspace bytes alive at once in a program: from a buffer's first write to its free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.plan.buffers import Role
from mesh_attention.plan.names import NamesOf, written
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Free, Program

__all__ = ["Peaks", "workspace_sizes"]


def workspace_sizes(program: Program, problem: Problem) -> dict[str, int]:
    return {b.name: b.num_bytes(problem) for b in program.buffers if b.role is Role.WORKSPACE}


class Peaks:
    """Of programs whose workspace buffers have these sizes.

    Those that write and free the same names in the same order have one peak, found once.
    """

    def __init__(self, sizes: Mapping[str, int], names_written: NamesOf | None = None) -> None:
        self._sizes = sizes
        self._written = names_written or NamesOf(written)
        self._known: dict[tuple[int, ...], int] = {}
        self._kept: list[Program] = []  # ids stay unique while the programs live

    def of(self, program: Program) -> int:
        steps = [op if isinstance(op, Free) else self._written(op) for op in program.operations]
        key = tuple(map(id, steps))
        if key not in self._known:
            self._known[key] = self._find(steps)
            self._kept.append(program)
        return self._known[key]

    def _find(self, steps: Sequence[Free | Sequence[str]]) -> int:
        live: set[str] = set()
        held = peak = 0
        for step in steps:
            if isinstance(step, Free):
                for name in live.intersection(step.buffers):
                    held -= self._sizes[name]
                    live.discard(name)
                continue
            for name in step:
                if name in self._sizes and name not in live:
                    live.add(name)
                    held += self._sizes[name]
            peak = max(peak, held)
        return peak
