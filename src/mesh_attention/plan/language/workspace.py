"""Where each workspace buffer lies, and which earlier operations an operation must wait for.

Both follow from one program alone, before anything runs; the passes, the executor and the
simulator ask for them.

Places: largest buffers first, each at the lowest offset at which no buffer that lives at the same
time lies. Offsets are for one batch element; a batch of B multiplies them.

Waits have three reasons: an operation reads what the other writes, it overwrites what the other
still uses, or it is the first to use memory that the other's buffer had before. Computation runs in
program order, so waits between two computations are left out.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mesh_attention.plan.language.buffers import Piece, Role
from mesh_attention.plan.language.program import (
    Communication,
    Free,
    Operation,
    Program,
    reads,
    writes,
)
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


_MANY = 8  # fewer pieces of one operation are looked at one by one

Heads = tuple[int, int] | None
Area = tuple[str, Heads, int, int]  # a piece as plain values: buffer, heads, first row and last
Uses = dict[Heads, list[tuple[int, int, int]]]  # by heads: rows, and the operation that used them


@dataclass(slots=True)
class _History:
    """Uses of one buffer. Most are of the same few slices of heads, which are compared once."""

    reads: Uses = field(default_factory=dict)
    writes: Uses = field(default_factory=dict)

    def write(self, heads: Heads, start: int, stop: int, at: int) -> None:
        """Whoever overlaps what lies inside this piece overlaps the piece, and this write has
        waited for those uses: they need not be remembered, or long programs take quadratic time."""
        for uses in (self.reads, self.writes):
            for others, rows in uses.items():
                if rows and (heads is None or others == heads or _inside(others, heads)):
                    rows[:] = [row for row in rows if row[0] < start or stop < row[1]]
        self.writes.setdefault(heads, []).append((start, stop, at))


def dependencies(program: Program, memory: WorkspaceMap) -> tuple[tuple[int, ...], ...]:
    """For each operation, the indices of the operations it waits for, ascending."""
    waits = _Waits(program, memory)
    return tuple([waits.of(at, op) for at, op in enumerate(program.operations)])


class _Waits:
    def __init__(self, program: Program, memory: WorkspaceMap) -> None:
        self._memory = memory
        self._communicates = [isinstance(op, Communication) for op in program.operations]
        # Of what the caller has, nobody waits for what no communication touches or nobody writes.
        written, exchanged = set[str](), set[str]()
        for op, communicates in zip(program.operations, self._communicates, strict=True):
            written.update(op.written)
            if communicates:
                exchanged.update(op.touched)
        self._matters = (written & exchanged) | memory.offsets.keys()
        self._history: dict[str, _History] = {}
        # Of workspace buffers, and who used them last.
        self._places: list[tuple[int, int, _History]] = []

    def of(self, at: int, op: Operation) -> tuple[int, ...]:
        if isinstance(op, Free):
            return ()
        matters, history = self._matters, self._history
        taken = together([piece for piece in reads(op) if piece.buffer in matters])
        written = together([piece for piece in writes(op) if piece.buffer in matters])
        waits: set[int] = set()
        for name in op.touched:
            if name in self._memory.offsets and name not in history:
                self._take_memory(name, waits)
        for area in taken:
            _find(waits, self._uses(area[0]).writes, area)
        for area in written:
            uses = self._uses(area[0])
            _find(waits, uses.writes, area)
            _find(waits, uses.reads, area)
        for buffer, heads, start, stop in taken:
            history[buffer].reads.setdefault(heads, []).append((start, stop, at))
        for buffer, heads, start, stop in written:
            history[buffer].write(heads, start, stop, at)
        if not waits:
            return ()
        communicates = self._communicates
        return tuple(sorted([i for i in waits if communicates[i] or communicates[at]]))

    def _uses(self, buffer: str) -> _History:
        history = self._history.get(buffer)
        if history is None:
            history = self._history[buffer] = _History()
        return history

    def _take_memory(self, name: str, waits: set[int]) -> None:
        """The first use of a buffer waits for the last ones of those that lay there before."""
        start = self._memory.offsets[name]
        stop = start + self._memory.sizes[name]
        covered = False
        for other_start, other_stop, last in [
            place for place in self._places if start < place[1] and place[0] < stop
        ]:
            for uses in (last.reads, last.writes):
                waits.update([at for rows in uses.values() for _, _, at in rows])
            covered = covered or (start <= other_start and other_stop <= stop)
        if covered:  # whoever has that memory next waits for this buffer, which waited for it
            self._places = [p for p in self._places if p[0] < start or stop < p[1]]
        self._places.append((start, stop, self._uses(name)))


def _find(waits: set[int], uses: Uses, area: Area) -> None:
    """Add the uses that overlap this."""
    _, heads, start, stop = area
    for others, rows in uses.items():
        if heads is None or others is None or (others[0] < heads[1] and heads[0] < others[1]):
            for a, b, at in rows:
                if a < stop and start < b:
                    waits.add(at)


def together(pieces: Sequence[Piece]) -> list[Area]:
    """Those that touch made one: an exchange among many ranks has many, of few buffers.

    >>> together([Piece("q", a, a + 2, (h, h + 1)) for a in (0, 2, 4, 6) for h in (0, 1)])
    [('q', (0, 2), 0, 8)]
    """
    if len(pieces) < _MANY:
        return [(piece.buffer, piece.heads, piece.start, piece.stop) for piece in pieces]
    by_heads: dict[tuple[str, Heads], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        by_heads[piece.buffer, piece.heads].append((piece.start, piece.stop))
    by_rows: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    made: list[Area] = []
    for (buffer, heads), rows in by_heads.items():
        for start, stop in _merged(rows):
            if heads is None:
                made.append((buffer, None, start, stop))
            else:
                by_rows[buffer, start, stop].append(heads)
    for (buffer, start, stop), heads_of_rows in by_rows.items():
        made += [(buffer, heads, start, stop) for heads in _merged(heads_of_rows)]
    return made


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(intervals) == 1:
        return intervals
    merged: list[tuple[int, int]] = []
    low, high = -1, -1
    for start, stop in sorted(intervals):
        if start > high:
            merged.append((low, high))
            low, high = start, stop
        elif stop > high:
            high = stop
    return [*merged[1:], (low, high)]


def _inside(heads: Heads, others: Heads) -> bool:
    """Whether heads lie among others, of which None are all."""
    if others is None or heads == others:
        return True
    return heads is not None and others[0] <= heads[0] and heads[1] <= others[1]
