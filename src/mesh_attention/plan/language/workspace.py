"""What follows from one program alone: where buffers lie, and which operations wait for others.

The passes, the executor and the simulator ask for it before anything runs.

Places: largest buffers first, each at the lowest offset at which no buffer that lives at the same
time lies. Offsets are for one batch element; a batch of B multiplies them.

Waits have three reasons: an operation reads what the other writes, it overwrites what the other
still uses, or it is the first to use memory that the other's buffer had before. Computation runs in
program order, so waits between two computations are left out.

Programs that are *alike* use buffers of the same sizes in the same way. Places and waits are the
same for all of them, whatever their members, tokens and calls are, and are computed once.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mesh_attention.plan.language.buffers import Buffer, Piece, Role
from mesh_attention.plan.language.program import (
    Attention,
    Call,
    CallKind,
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
    offsets = {b.name: b.offset for b in program.buffers if b.offset is not None}
    lives = {} if offsets else lifetimes(program)
    sizes = {
        b.name: -(-b.num_bytes(problem) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for b in program.buffers
        if b.name in (offsets or lives)
    }
    if not offsets:
        offsets = _fit(sizes, lives)
    total = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return WorkspaceMap(offsets, sizes, total)


def _fit(sizes: dict[str, int], lives: dict[str, tuple[int, int]]) -> dict[str, int]:
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
    return offsets


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
    """The uses of one buffer. Most share a few slices of heads, which are compared once."""

    reads: Uses = field(default_factory=dict)
    writes: Uses = field(default_factory=dict)

    def write(self, heads: Heads, start: int, stop: int, at: int) -> None:
        """Remember this write, and forget earlier uses inside the same piece: whatever overlaps
        them overlaps this write, which waited for them. Otherwise long programs would take
        quadratic time."""
        single = heads is not None and heads[1] - heads[0] == 1  # no other heads lie inside
        for uses in (self.reads, self.writes):
            for others in (heads,) if single else uses:
                rows = uses.get(others)
                if rows and (single or _inside(others, heads)):
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
        # Nobody waits for the caller's buffers unless they are both written and communicated.
        written, exchanged = set[str](), set[str]()
        for op, communicates in zip(program.operations, self._communicates, strict=True):
            written.update(op.written)
            if communicates:
                exchanged.update(op.touched)
        self._matters = (written & exchanged) | memory.offsets.keys()
        self._history: dict[str, _History] = defaultdict(_History)
        self._places: list[tuple[int, int, _History]] = []  # start and stop of workspace buffers

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
            _find(waits, history[area[0]].writes, area)
        for area in written:
            _find(waits, history[area[0]].writes, area)
            _find(waits, history[area[0]].reads, area)
        for buffer, heads, start, stop in taken:
            history[buffer].reads.setdefault(heads, []).append((start, stop, at))
        for buffer, heads, start, stop in written:
            history[buffer].write(heads, start, stop, at)
        if not waits:
            return ()
        communicates = self._communicates
        return tuple(sorted([i for i in waits if communicates[i] or communicates[at]]))

    def _take_memory(self, name: str, waits: set[int]) -> None:
        """The first use of a buffer waits for the last uses of buffers that lay there before."""
        start = self._memory.offsets[name]
        stop = start + self._memory.sizes[name]
        covered = False
        for other_start, other_stop, last in [
            place for place in self._places if start < place[1] and place[0] < stop
        ]:
            for uses in (last.reads, last.writes):
                waits.update([at for rows in uses.values() for _, _, at in rows])
            covered = covered or (start <= other_start and other_stop <= stop)
        if covered:  # the next buffer there waits for this buffer, which waited for the old one
            self._places = [p for p in self._places if p[0] < start or stop < p[1]]
        self._places.append((start, stop, self._history[name]))


def _find(waits: set[int], uses: Uses, area: Area) -> None:
    """Add the operations whose uses overlap this area."""
    _, heads, start, stop = area
    for others, rows in uses.items():
        if heads is None or others is None or (others[0] < heads[1] and heads[0] < others[1]):
            for a, b, at in rows:
                if a < stop and start < b:
                    waits.add(at)


def together(pieces: Sequence[Piece]) -> list[Area]:
    """Pieces as areas, joined where they touch: an exchange among many ranks has many pieces.

    >>> together([Piece("q", a, a + 2, (h, h + 1)) for a in (0, 2, 4, 6, 8) for h in (0, 1)])
    [('q', (0, 2), 0, 10)]
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
    """Whether `heads` lie among `others`; None means all heads."""
    if others is None or heads == others:
        return True
    return heads is not None and others[0] <= heads[0] and heads[1] <= others[1]


def _all_rows(op: Attention) -> tuple[Call, ...]:
    return (Call(CallKind.FULL, 0, op.q.num_rows, 0, op.k.num_rows),)


def without_calls(program: Program) -> Program:
    """Equal for programs of a rank that are alike, which batches with other masks often have."""
    operations = [
        replace(op, calls=_all_rows(op) if is_one_call(op) else ())
        if isinstance(op, Attention)
        else op
        for op in program.operations
    ]
    return replace(program, operations=tuple(operations))


class Alike:
    """Numbers for the programs of one pass; programs that are alike have equal numbers."""

    def __init__(self) -> None:
        # By identity: ranks share most objects, and the hash of others would be used only once.
        # The objects are kept too, so that no other object gets the same identity.
        self._by_buffer: dict[int, tuple[Buffer, int]] = {}
        self._by_op: dict[int, tuple[Operation, int]] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self._tables: dict[tuple[int, ...], int] = {}
        self._uses: dict[object, int] = {}

    def table(self, program: Program) -> int:
        """By the buffers: their names and sizes."""
        numbers = []
        for b in program.buffers:
            known = self._by_buffer.get(id(b))
            if known is None:
                key = (b.name, b.kind, b.precision, b.role, b.num_heads, b.num_rows, b.offset)
                known = b, self._shapes.setdefault(key, len(self._shapes))
                self._by_buffer[id(b)] = known
            numbers.append(known[1])
        return self._tables.setdefault(tuple(numbers), len(self._tables))

    def uses(self, program: Program) -> tuple[int, ...]:
        """By the tasks and pieces of each operation. Where also the tables are alike, programs
        are."""
        return tuple([self._use(op) for op in program.operations])

    def _use(self, op: Operation) -> int:
        known = self._by_op.get(id(op))
        if known is None:
            pieces = (op.buffers,) if isinstance(op, Free) else (reads(op), writes(op))
            whole = isinstance(op, Attention) and is_one_call(op)
            key = (op.task, type(op), whole, *pieces)
            known = self._by_op[id(op)] = op, self._uses.setdefault(key, len(self._uses))
        return known[1]


def is_one_call(op: Attention) -> bool:
    """Whether the attention is one call for all rows of both sides."""
    if len(op.calls) != 1:
        return False
    (call,) = op.calls
    rows = call.q_start, call.q_stop, call.k_start, call.k_stop
    return rows == (0, op.q.num_rows, 0, op.k.num_rows)
