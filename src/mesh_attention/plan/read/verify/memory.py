"""Symbolic memory: what each cell of each buffer of each rank holds during verification.

A cell is one token atom of one head atom (`atoms.py`). It holds nothing, `DATA` (the true value of
what its buffer is declared to hold), or a `Partial`: a softmax or a sum over the pairs in `cover`.
The verifier (`machine.py`, `compute.py`, `communicate.py`) runs the operations of a plan on it.
Nothing else changes: the plan is only read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple, TypeVar, cast

from mesh_attention.plan.language.buffers import Buffer, Piece, Role
from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify.atoms import Atoms, BufferCells


class Broken(Exception):  # noqa: N818 - it never leaves the verifier
    """An operation breaks a rule. The verifier ends the pass and reports `message` for `rank`."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.message = message


class Partial(NamedTuple):  # a tuple, because hundreds of thousands of them are made
    """A partial result over the pairs in `cover` (a bit set of atoms of the other side).

    `scaled_to`: the pairs of the softmax to which a partial output was rescaled; outputs rescaled
    to the same softmax are simply added. None: the result was not rescaled.
    """

    cover: int
    scaled_to: int | None = None


class _Data:
    def __repr__(self) -> str:
        return "DATA"


DATA = _Data()
Content = Partial | _Data
Indices = slice | tuple[int, ...]  # of cells in a buffer
T = TypeVar("T")


class Entry:
    """One buffer of one rank. `values` has the content of each cell; it is None before the first
    write and after the free."""

    __slots__ = ("buffer", "cells", "freed", "values")

    def __init__(self, buffer: Buffer, cells: BufferCells) -> None:
        self.buffer, self.cells, self.freed = buffer, cells, False
        self.values: list[Content | None] | None = None


class Memory:
    """The buffers of all ranks. A method raises `Broken` if the operation that calls it breaks a
    rule, such as to read only what was written and is not freed."""

    def __init__(self, problem: Problem, pass_: Pass, atoms: Atoms) -> None:
        self._problem = problem
        self._atoms = atoms
        self._entries: list[dict[str, Entry]] = []
        for program in pass_.programs:
            entries = {b.name: Entry(b, atoms.cells(b)) for b in program.buffers}
            self._entries.append(entries)
            for entry in entries.values():
                if entry.buffer.role.is_filled:
                    entry.values = [DATA] * len(entry.cells)

    def buffer(self, rank: int, piece: Piece) -> Buffer:
        return self._entries[rank][piece.buffer].buffer

    def cells(self, rank: int, piece: Piece) -> BufferCells:
        return self._entries[rank][piece.buffer].cells

    def labels(self, rank: int, piece: Piece) -> list[tuple[int, int]]:
        """The (token atom, head atom) that each cell of a piece is declared to hold."""
        entry = self._entries[rank][piece.buffer]
        return _take(entry.cells.labels, self._indices(entry, piece))

    def read(self, rank: int, piece: Piece) -> list[Content]:
        entry, name = self._entries[rank][piece.buffer], piece.buffer
        if entry.values is None:
            when = "after it was freed" if entry.freed else "before it arrived"
            raise Broken(rank, f"uses {name} {when}")
        values = _take(entry.values, self._indices(entry, piece))
        if not all(values):  # only None is false
            rows = f"{piece.start}:{piece.stop}"
            raise Broken(rank, f"uses rows {rows} of {name} before they arrived")
        return cast(list[Content], values)

    def write(
        self, rank: int, piece: Piece, values: list[Content], *, accumulates: bool = False
    ) -> None:
        """Store a value in each cell of a piece. The cells must be empty, unless the operation
        `accumulates`: then its values include the old ones, which it has read."""
        entry, name = self._entries[rank][piece.buffer], piece.buffer
        if entry.buffer.role.is_filled:
            raise Broken(rank, f"writes to {name}, which is {entry.buffer.role}")
        if entry.freed:
            raise Broken(rank, f"writes to {name} after it was freed")
        if entry.values is None:
            entry.values = [None] * len(entry.cells)
        cells, indices = entry.values, self._indices(entry, piece)
        before = _take(cells, indices)
        if len(before) != len(values):
            raise Broken(rank, f"gets {len(values)} cells for {len(before)} of {name}")
        if not accumulates and any(before):
            raise Broken(rank, f"overwrites {name}, which holds something already")
        if isinstance(indices, slice):
            cells[indices] = values
        else:
            for i, value in zip(indices, values, strict=True):
                cells[i] = value

    def transfer(self, source: int, taken: Piece, target: int, received: Piece) -> None:
        """Copy a piece to another rank; both must be declared to hold the same tokens and heads."""
        have = self._entries[source][taken.buffer]
        want = self._entries[target][received.buffer]
        sent, filled = self._indices(have, taken), self._indices(want, received)
        self.expect_same_kind(source, have.buffer, target, want.buffer)
        alike = have.cells is want.cells and sent == filled
        if not alike and _take(have.cells.labels, sent) != _take(want.cells.labels, filled):
            raise Broken(
                target,
                f"receives other tokens or heads from rank {source} than {received.buffer} holds",
            )
        self.write(target, received, self.read(source, taken))

    def expect_same_kind(self, source: int, have: Buffer, target: int, want: Buffer) -> None:
        """What a rank sends must have the kind and the precision of the buffer that receives it."""
        if have.kind is want.kind and have.precision is want.precision:
            return
        # fp32 and fp64 tensors accumulate in their own precision: both have the same size there.
        sizes = (have.precision.num_bytes(self._problem), want.precision.num_bytes(self._problem))
        if have.kind is not want.kind or sizes[0] != sizes[1]:
            raise Broken(
                target,
                f"receives {have.kind} ({have.precision}) of rank {source} "
                f"into {want.name}, which holds {want.kind} ({want.precision})",
            )

    def free(self, rank: int, name: str) -> None:
        entry = self._entries[rank][name]
        if entry.buffer.role is not Role.WORKSPACE:
            raise Broken(rank, f"frees {name}, which is not of the workspace")
        if entry.values is None:
            raise Broken(rank, f"frees {name}, which holds nothing")
        entry.values = None
        entry.freed = True

    def leaks(self, rank: int) -> list[str]:
        """Workspace buffers that were written and never freed."""
        return [
            name
            for name, entry in self._entries[rank].items()
            if entry.values is not None and entry.buffer.role is Role.WORKSPACE
        ]

    def outputs(self, rank: int) -> Iterator[tuple[Buffer, tuple[int, int], Content | None]]:
        """(buffer, label, content) of every cell of every buffer that outlives the program."""
        for entry in self._entries[rank].values():
            if entry.buffer.role in (Role.OUTPUT, Role.KEPT):
                values = entry.values or [None] * len(entry.cells)
                for label, value in zip(entry.cells.labels, values, strict=True):
                    yield entry.buffer, label, value

    def _indices(self, entry: Entry, piece: Piece) -> Indices:
        """The cells of a piece among those of its buffer: a slice if they are consecutive. A token
        atom belongs to the piece if its first row does."""
        cells, key = entry.cells, (piece.start, piece.stop, piece.heads)
        if key not in cells.of_pieces:
            rows, width = cells.first_rows, len(cells.heads)
            first, last = bisect_left(rows, piece.start), bisect_left(rows, piece.stop)
            low, high = (
                bisect_left(cells.heads, self._atoms.head_atom(entry.buffer, head))
                for head in piece.heads or (0, entry.buffer.num_heads)
            )
            if last - first == 1 or high - low == width:
                cells.of_pieces[key] = slice(first * width + low, (last - 1) * width + high)
            else:
                atoms, heads = range(first, last), range(low, high)
                cells.of_pieces[key] = tuple(a * width + h for a in atoms for h in heads)
        return cells.of_pieces[key]


def _take(items: list[T], indices: Indices) -> list[T]:
    return items[indices] if isinstance(indices, slice) else [items[i] for i in indices]
