"""Where each workspace buffer lies, and how many bytes live at once: known before anything runs.

Largest buffers first, each at the lowest offset at which no buffer that lives at the same time
lies. Offsets are for one batch element; a batch of B multiplies them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.program import Free, Program
from mesh_attention.plan.problem.problem import Problem

ALIGNMENT_BYTES = 256  # what CUDA allocations guarantee, and enough for any vector load


@dataclass(frozen=True, slots=True)
class WorkspaceMap:
    offsets: dict[str, int]
    sizes: dict[str, int]
    total_bytes: int


def workspace_map(program: Program, problem: Problem) -> WorkspaceMap:
    """Where a pass has placed the buffers, or where they fit."""
    if any(b.offset is not None for b in program.buffers):
        return _as_placed(program, problem)
    lives = lifetimes(program)
    sizes = {
        b.name: -(-b.num_bytes(problem) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for b in program.buffers
        if b.name in lives
    }
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # start, stop, born, freed; ascending
    for name in sorted(sizes, key=lambda n: (-sizes[n], lives[n])):
        (born, freed), size, at = lives[name], sizes[name], 0
        for start, stop, other_born, other_freed in placed:
            if other_born <= freed and born <= other_freed:
                if at + size <= start:
                    break
                if at < stop:
                    at = stop
        offsets[name] = at
        insort(placed, (at, at + size, born, freed))
    total = max((offsets[n] + sizes[n] for n in offsets), default=0)
    return WorkspaceMap(offsets, sizes, total)


def _as_placed(program: Program, problem: Problem) -> WorkspaceMap:
    offsets = {b.name: b.offset for b in program.buffers if b.offset is not None}
    sizes = {
        b.name: -(-b.num_bytes(problem) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for b in program.buffers
        if b.name in offsets
    }
    total = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return WorkspaceMap(offsets, sizes, total)


def lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """First use and free of each workspace buffer, by operation index."""
    workspace = {b.name for b in program.buffers if b.role is Role.WORKSPACE}
    born: dict[str, int] = {}
    freed: dict[str, int] = {}
    for at, op in enumerate(program.operations):
        if isinstance(op, Free):
            freed.update(dict.fromkeys(op.buffers, at))
            continue
        for name in op.touched:
            if name in workspace and name not in born:
                born[name] = at
    end = len(program.operations)
    return {name: (at, freed.get(name, end)) for name, at in born.items()}


def peak_buffer_bytes(program: Program, problem: Problem) -> int:
    """The most workspace bytes alive at once: from a buffer's first use to its free."""
    sizes = {b.name: b.num_bytes(problem) for b in program.buffers}
    changes: Counter[int] = Counter()
    for name, (born, freed) in lifetimes(program).items():
        changes[born] += sizes[name]
        changes[freed] -= sizes[name]
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)
