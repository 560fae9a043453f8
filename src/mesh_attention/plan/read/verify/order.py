"""One rank's own program, proven in its order alone: cheap enough for every program that runs.

`verify` needs the programs of all ranks. A rank that runs has its own, and one look at each
operation shows whether it reads rows that nothing has written, or a buffer that is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.plan.language.buffers import Buffer, Piece
from mesh_attention.plan.language.member_pieces import heads_as_bits
from mesh_attention.plan.language.program import Free, Program, reads, writes
from mesh_attention.plan.language.workspace import Area, together

_Written = dict[int, list[tuple[int, int]]]  # rows by heads


def order_fault(program: Program) -> str | None:
    """The first operation that reads what is not there, and how; None if there is none.

    >>> from mesh_attention.plan.language.buffers import Kind
    >>> from mesh_attention.plan.language.program import Merge, MergeRule, Task
    >>> a, b = (Buffer(name, Kind.GRAD_Q, ((0, 4),), (0, 1)) for name in "ab")
    >>> copy = Merge(Task("copy"), MergeRule.SUM, (Piece("a", 0, 4),), (Piece("b", 0, 4),))
    >>> order_fault(Program(0, (a, b), (copy,)))
    'copy reads a before it is written'
    """
    table = program.buffer_table()
    written: dict[str, _Written] = {}
    freed: set[str] = set()
    for op in program.operations:
        if isinstance(op, Free):
            freed.update(op.buffers)
            continue
        if not freed.isdisjoint(op.touched):
            name = next(name for name in op.touched if name in freed)
            return f"{op.name} uses {name} after it is freed"
        for area in _inside(reads(op), table):
            if not _covered(written.get(area[0], {}), area, table[area[0]]):
                return f"{op.name} reads {area[0]} before it is written"
        for buffer, heads, start, stop in _inside(writes(op), table):
            rows = written.setdefault(buffer, {}).setdefault(heads, [])
            if (start, stop) not in rows:
                rows.append((start, stop))
    return None


def _inside(pieces: Sequence[Piece], table: dict[str, Buffer]) -> list[Area]:
    """The pieces of buffers that the program itself has to fill, as areas."""
    return together([p for p in pieces if p.stop > p.start and not table[p.buffer].role.is_filled])


def _covered(written: _Written, area: Area, buffer: Buffer) -> bool:
    _, heads, start, stop = area
    if any(a <= start and stop <= b for a, b in written.get(heads, ())):
        return True
    # By several pieces: each takes away its part, and nothing may be left.
    left = [(start, stop, heads_as_bits((0, buffer.num_heads)) if heads < 0 else heads)]
    for others, rows in written.items():
        for a, b in rows:
            left = [rest for part in left for rest in _without(part, (a, b, others))]
            if not left:
                return True
    return False


_Part = tuple[int, int, int]  # first row and last, and heads as bits


def _without(part: _Part, other: _Part) -> list[_Part]:
    """What is left of a part without the other.

    >>> _without((0, 9, 0b1111), (2, 5, 0b1110))
    [(0, 2, 15), (5, 9, 15), (2, 5, 1)]
    """
    start, stop, heads = part
    a, b = max(start, other[0]), min(stop, other[1])
    if a >= b or not heads & other[2]:
        return [part]
    parts = [(start, a, heads), (b, stop, heads), (a, b, heads & ~other[2])]
    return [part for part in parts if part[0] < part[1] and part[2]]
