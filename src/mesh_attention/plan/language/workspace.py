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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TypeVar

from mesh_attention.plan.language.buffers import Buffer, Piece, Role
from mesh_attention.plan.language.member_pieces import MemberPieces, heads_as_bits
from mesh_attention.plan.language.program import (
    AllToAll,
    Attention,
    CallKind,
    Communication,
    Free,
    Operation,
    Program,
    reads,
    whole_call,
    writes,
)
from mesh_attention.plan.problem.problem import Problem

T = TypeVar("T")

ALIGNMENT_BYTES = 256  # what CUDA allocations guarantee, and enough for any vector load


@dataclass(frozen=True, slots=True)
class WorkspaceMap:
    """Where each workspace buffer begins, its bytes, and the bytes of the whole workspace."""

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


Area = tuple[str, int, int, int]  # of a buffer: heads as bits, first row and last
Uses = dict[int, list[tuple[int, int, int]]]  # by heads: rows, and the operation that used them


@dataclass(slots=True)
class _History:
    """The uses of one buffer. Most share a few sets of heads, which are compared once."""

    reads: Uses = field(default_factory=dict)
    writes: Uses = field(default_factory=dict)

    def write(self, heads: int, start: int, stop: int, at: int) -> None:
        """Remember this write, and forget earlier uses inside the same area: whatever overlaps
        them overlaps this write, which waited for them. Otherwise long programs would take
        quadratic time."""
        for uses in (self.reads, self.writes):
            for others, rows in uses.items():
                if rows and not others & ~heads:
                    rows[:] = [row for row in rows if row[0] < start or stop < row[1]]
        self.writes.setdefault(heads, []).append((start, stop, at))


def dependencies(program: Program, memory: WorkspaceMap) -> tuple[tuple[int, ...], ...]:
    """For each operation, the indices of the operations it waits for, ascending."""
    waits = _Waits(program, memory)
    return tuple([waits.of(at, op) for at, op in enumerate(program.operations)])


class _Waits:
    """Goes through a program in order: `of` says which operations the next one waits for."""

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
        taken, written = ([area for area in areas if area[0] in matters] for areas in _areas(op))
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
        if heads & others:
            for a, b, at in rows:
                if a < stop and start < b:
                    waits.add(at)


def _areas(op: Operation) -> tuple[list[Area], list[Area]]:
    """What an operation reads, and what it writes."""
    if not isinstance(op, AllToAll):
        return together(reads(op)), together(writes(op))
    if "areas" not in op.known:
        op.known["areas"] = tuple(map(_areas_of_side, (op.sends, op.receives)))
    areas: tuple[list[Area], list[Area]] = op.known["areas"]
    return areas


def _areas_of_side(side: Sequence[tuple[Piece, ...]]) -> list[Area]:
    if not isinstance(side, MemberPieces):
        return together([*chain.from_iterable(side)])
    return [
        (tensor.name + end, heads, start, stop)
        for tensor in side.tensors
        for start, stop in _merged([*chain.from_iterable(tensor.rows)])
        for end, heads in tensor.holders.bits.items()
    ]


def together(pieces: Sequence[Piece]) -> list[Area]:
    """Pieces as areas, joined where they touch: an exchange among many ranks has many pieces.

    >>> together([Piece("q", a, a + 2, (h, h + 1)) for a in (0, 2, 4, 6, 8) for h in (0, 2)])
    [('q', 5, 0, 10)]
    """
    heads_of: dict[tuple[str, int, int], int] = {}
    for piece in pieces:
        rows, heads = (piece.buffer, piece.start, piece.stop), heads_as_bits(piece.heads)
        heads_of[rows] = heads_of[rows] | heads if rows in heads_of else heads
    areas: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for (buffer, start, stop), heads in heads_of.items():
        areas[buffer, heads].append((start, stop))
    return [(*area, a, b) for area, rows_of in areas.items() for a, b in _merged(rows_of)]


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(intervals) < 2:
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


def without_calls(program: Program) -> Program:
    """Equal for programs of a rank that are alike, which batches with other masks often have."""
    operations = [
        replace(op, calls=(whole_call(op, CallKind.FULL),) if is_one_call(op) else ())
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
        self._numbers: dict[int, tuple[object, int]] = {}
        self._equal: dict[object, int] = {}
        self._tables: dict[tuple[int, ...], int] = {}
        self._alone: Program | None = None  # the first, while nobody has asked for a second

    def table(self, program: Program) -> int:
        """By the buffers: their names and sizes. A program alone is not looked at: most searches
        ask for one."""
        if not self._tables:
            if self._alone is None or self._alone is program:
                self._alone = program
                return 0
            self._tables[self._buffers(self._alone)] = 0
        return self._tables.setdefault(self._buffers(program), len(self._tables))

    def _buffers(self, program: Program) -> tuple[int, ...]:
        return tuple([self._number(buffer, _size_of) for buffer in program.buffers])

    def uses(self, program: Program) -> tuple[int, ...]:
        """By the tasks and pieces of each operation. Where also the tables are alike, programs
        are."""
        return tuple([self._number(op, self._use_of) for op in program.operations])

    def _use_of(self, op: Operation) -> object:
        if isinstance(op, AllToAll):  # among many ranks it has many pieces, which plans share
            sides = (op.sends, op.receives)
            pieces: tuple[object, ...] = tuple(self._number(side, _in_brief) for side in sides)
        else:
            pieces = (op.buffers,) if isinstance(op, Free) else (reads(op), writes(op))
        return op.task, type(op), isinstance(op, Attention) and is_one_call(op), *pieces

    def _number(self, item: T, key_of: Callable[[T], object]) -> int:
        known = self._numbers.get(id(item))
        if known is None:
            number = self._equal.setdefault(key_of(item), len(self._equal))
            known = self._numbers[id(item)] = item, number
        return known[1]


def _in_brief(side: Sequence[tuple[Piece, ...]]) -> object:
    return side.tensors if isinstance(side, MemberPieces) else side


def _size_of(b: Buffer) -> object:
    return b.name, b.kind, b.precision, b.role, b.num_heads, b.num_rows, b.offset


def is_one_call(op: Attention) -> bool:
    """Whether the attention is one call for all rows of both sides."""
    if len(op.calls) != 1:
        return False
    call = op.calls[0]
    begins = call.q_start == 0 and call.k_start == 0
    return begins and call.q_stop == op.q.num_rows and call.k_stop == op.k.num_rows
