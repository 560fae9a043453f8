"""Symbolic memory: what each cell of each buffer of each rank holds during verification.

A cell is one token atom of one head atom. It holds nothing, `DATA` (the true value of what its
buffer is declared to hold), or a `Partial`: a softmax or a sum over the pairs in `cover`.
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
    """An operation cannot go on; carries the rank whose fault it shows."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.message = message


class Partial(NamedTuple):  # a tuple, because hundreds of thousands of them are made
    """A partial result over the pairs in `cover` (a bit set of atoms of the other side).

    `scaled_to`: a partial output that was rescaled to a softmax over those pairs; such outputs add
    up plainly. None: it is normalised by its own pairs.
    """

    cover: int
    scaled_to: int | None = None


class _Data:
    def __repr__(self) -> str:
        return "DATA"


DATA = _Data()
Content = Partial | _Data
Where = slice | tuple[int, ...]
T = TypeVar("T")


class Entry:
    """One buffer of one rank. `values` is None before the first write and after the free."""

    __slots__ = ("buffer", "cells", "freed", "values")

    def __init__(self, buffer: Buffer, cells: BufferCells) -> None:
        self.buffer, self.cells, self.freed = buffer, cells, False
        self.values: list[Content | None] | None = None


class Memory:
    """The buffers of all ranks. Reading what was never written or is freed breaks the plan."""

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
        """What the cells of a piece are declared to hold."""
        entry = self._entries[rank][piece.buffer]
        return _take(entry.cells.labels, self._where(entry, piece))

    def read(self, rank: int, piece: Piece) -> list[Content]:
        entry, name = self._entries[rank][piece.buffer], piece.buffer
        if entry.values is None:
            when = "after it was freed" if entry.freed else "before it arrived"
            raise Broken(rank, f"uses {name} {when}")
        values = _take(entry.values, self._where(entry, piece))
        if not all(values):  # only None is false
            rows = f"{piece.start}:{piece.stop}"
            raise Broken(rank, f"uses rows {rows} of {name} before they arrived")
        return cast(list[Content], values)

    def write(
        self, rank: int, piece: Piece, values: list[Content], *, accumulates: bool = False
    ) -> None:
        """`accumulates`: the operation read the old values; otherwise nothing may be lost."""
        entry, name = self._entries[rank][piece.buffer], piece.buffer
        if entry.buffer.role.is_filled:
            raise Broken(rank, f"writes to {name}, which is {entry.buffer.role}")
        if entry.freed:
            raise Broken(rank, f"writes to {name} after it was freed")
        if entry.values is None:
            entry.values = [None] * len(entry.cells)
        cells, where = entry.values, self._where(entry, piece)
        before = _take(cells, where)
        if len(before) != len(values):
            raise Broken(rank, f"gets {len(values)} cells for {len(before)} of {name}")
        if not accumulates and any(before):
            raise Broken(rank, f"overwrites {name}, which holds something already")
        if isinstance(where, slice):
            cells[where] = values
        else:
            for i, value in zip(where, values, strict=True):
                cells[i] = value

    def transfer(self, source: int, taken: Piece, target: int, received: Piece) -> None:
        """Copy a piece to another rank; both must be declared to hold the same tokens and heads."""
        have = self._entries[source][taken.buffer]
        want = self._entries[target][received.buffer]
        here, there = self._where(have, taken), self._where(want, received)
        self.expect_same_kind(source, have.buffer, target, want.buffer)
        alike = have.cells is want.cells and here == there
        if not alike and _take(have.cells.labels, here) != _take(want.cells.labels, there):
            raise Broken(
                target,
                f"receives other tokens or heads from rank {source} than {received.buffer} holds",
            )
        self.write(target, received, self.read(source, taken))

    def expect_same_kind(self, source: int, have: Buffer, target: int, want: Buffer) -> None:
        """What a rank sends must be of the kind and the precision that the other rank holds."""
        if have.kind is want.kind and have.precision is want.precision:
            return
        # fp32 and fp64 tensors accumulate in their own precision: there the two are one.
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
        """Every cell of every buffer that outlives the program: the buffer, what it should hold,
        and what it holds."""
        for entry in self._entries[rank].values():
            if entry.buffer.role in (Role.OUTPUT, Role.KEPT):
                values = entry.values or [None] * len(entry.cells)
                for label, value in zip(entry.cells.labels, values, strict=True):
                    yield entry.buffer, label, value

    def _where(self, entry: Entry, piece: Piece) -> Where:
        """A slice where the cells follow each other; an atom belongs to the piece if its first row
        does."""
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
                inside = range(first, last), range(low, high)
                cells.of_pieces[key] = tuple(a * width + i for a in inside[0] for i in inside[1])
        return cells.of_pieces[key]


def _take(items: list[T], where: Where) -> list[T]:
    return items[where] if isinstance(where, slice) else [items[i] for i in where]
