"""Which earlier operations an operation must wait for.

Three reasons: it reads what the other writes, it overwrites what the other still uses, or it is the
first to use memory that the other's buffer had before. Computation runs in program order, so waits
between two computations are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from mesh_attention.plan.buffers import Piece
from mesh_attention.plan.program import Communication, Program, reads, writes
from mesh_attention.plan.workspace import WorkspaceMap

_MANY = 8  # fewer pieces of one operation are looked at one by one


@dataclass(slots=True)
class _History:
    reads: list[tuple[Piece, int]] = field(default_factory=list)
    writes: list[tuple[Piece, int]] = field(default_factory=list)

    def write(self, piece: Piece, at: int) -> None:
        """Whoever overlaps what lies inside this piece overlaps the piece, and this write has
        waited for those uses: they need not be remembered, or long programs take quadratic time."""
        self.reads = [(old, i) for old, i in self.reads if not _inside(old, piece)]
        self.writes = [(old, i) for old, i in self.writes if not _inside(old, piece)]
        self.writes.append((piece, at))


def dependencies(program: Program, memory: WorkspaceMap) -> tuple[tuple[int, ...], ...]:
    """For each operation, the indices of the operations it waits for, ascending."""
    history: dict[str, _History] = defaultdict(_History)
    places: list[tuple[int, int, _History]] = []  # of workspace buffers, and who used them last
    result: list[tuple[int, ...]] = []
    communicates = [isinstance(op, Communication) for op in program.operations]
    for at, op in enumerate(program.operations):
        waits: set[int] = set()
        taken, given = _together(reads(op)), _together(writes(op))
        for piece in given:
            if piece.buffer in memory.offsets and piece.buffer not in history:
                start = memory.offsets[piece.buffer]
                stop = start + memory.sizes[piece.buffer]
                kept = []
                for place in places:
                    other_start, other_stop, used = place
                    if start < other_stop and other_start < stop:
                        waits.update(i for _, i in (*used.reads, *used.writes))
                    # Whoever has that memory next waits for this buffer, which waited for it.
                    if not (start <= other_start and other_stop <= stop):
                        kept.append(place)
                places = [*kept, (start, stop, history[piece.buffer])]
        for piece in taken:
            waits.update(i for other, i in history[piece.buffer].writes if piece.overlaps(other))
        for piece in given:
            used = history[piece.buffer]
            both = (*used.writes, *used.reads)
            waits.update(i for other, i in both if piece.overlaps(other))
        for piece in taken:
            history[piece.buffer].reads.append((piece, at))
        for piece in given:
            history[piece.buffer].write(piece, at)
        result.append(tuple(sorted(i for i in waits if communicates[i] or communicates[at])))
    return tuple(result)


def _together(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that touch made one: an exchange among many ranks has many, of few buffers.

    >>> _together([Piece("q", a, a + 2, (h, h + 1)) for a in (0, 2, 4, 6) for h in (0, 1)])
    [Piece(buffer='q', start=0, stop=8, heads=(0, 2))]
    """
    found = list(pieces)
    if len(found) < _MANY:
        return found
    by_heads: dict[tuple[str, tuple[int, int] | None], list[tuple[int, int]]] = defaultdict(list)
    for piece in found:
        by_heads[piece.buffer, piece.heads].append((piece.start, piece.stop))
    by_rows: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    made: list[Piece] = []
    for (buffer, heads), rows in by_heads.items():
        for start, stop in _merged(rows):
            if heads is None:
                made.append(Piece(buffer, start, stop))
            else:
                by_rows[buffer, start, stop].append(heads)
    for (buffer, start, stop), heads_of_rows in by_rows.items():
        made += [Piece(buffer, start, stop, heads) for heads in _merged(heads_of_rows)]
    return made


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _inside(one: Piece, other: Piece) -> bool:
    if not (other.start <= one.start and one.stop <= other.stop):
        return False
    if other.heads is None or one.heads == other.heads:
        return True
    return (
        one.heads is not None and other.heads[0] <= one.heads[0] and one.heads[1] <= other.heads[1]
    )
