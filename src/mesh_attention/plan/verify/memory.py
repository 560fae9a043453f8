"""Symbolic memory: what each cell of each buffer of each rank holds during verification.

A cell is one token atom of one head atom. It holds nothing, `DATA` (the true value of what its
buffer is declared to hold), or a `Partial`: a softmax or a sum over the pairs in `cover`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.buffers import Buffer, Kind, Piece, Role
from mesh_attention.plan.plan import Pass
from mesh_attention.plan.verify.atoms import Atoms, Cells
from mesh_attention.plan.verify.finding import Broken

__all__ = ["DATA", "Memory", "Partial", "Value"]


@dataclass(frozen=True, slots=True)
class Partial:
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
Value = Partial | _Data


class Memory:
    """The buffers of all ranks. Reading what was never written or is freed breaks the plan."""

    def __init__(self, one: Pass, atoms: Atoms) -> None:
        self.atoms = atoms
        self.tables = [program.buffer_table() for program in one.programs]
        self._cells: list[dict[str, list[Value | None]]] = []
        self._freed: list[set[str]] = []
        for table in self.tables:
            cells: dict[str, list[Value | None]] = {}
            for buffer in table.values():
                if buffer.role is Role.INPUT:
                    cells[buffer.name] = [DATA] * atoms.num_cells(buffer)
            self._cells.append(cells)
            self._freed.append(set())

    def buffer(self, rank: int, piece: Piece) -> Buffer:
        return self.tables[rank][piece.buffer]

    def where(self, rank: int, piece: Piece) -> Cells:
        return self.atoms.cells(self.tables[rank][piece.buffer], piece)

    def read(self, rank: int, piece: Piece) -> list[Value]:
        name = piece.buffer
        cells = self._cells[rank].get(name)
        if cells is None:
            when = "after it was freed" if name in self._freed[rank] else "before anything arrived"
            raise Broken(rank, f"uses {name} {when}")
        values = [cells[i] for i in self.where(rank, piece).index]
        if None in values:
            raise Broken(rank, f"uses rows {piece.start}:{piece.stop} of {name} before they arrived")
        return values  # type: ignore[return-value]

    def write(self, rank: int, piece: Piece, values: list[Value]) -> None:
        name = piece.buffer
        buffer = self.tables[rank][name]
        if buffer.role is Role.INPUT:
            raise Broken(rank, f"writes to the input {name}")
        if name in self._freed[rank]:
            raise Broken(rank, f"writes to {name} after it was freed")
        cells = self._cells[rank].get(name)
        if cells is None:
            cells = self._cells[rank][name] = [None] * self.atoms.num_cells(buffer)
        index = self.where(rank, piece).index
        if len(index) != len(values):
            raise Broken(rank, f"gets {len(values)} cells for {len(index)} of {name}")
        if buffer.role is Role.OUTPUT and any(cells[i] is not None for i in index):
            raise Broken(rank, f"writes the output {name} twice")
        for i, value in zip(index, values, strict=True):
            cells[i] = value

    def transfer(self, source: int, taken: Piece, target: int, given: Piece) -> None:
        """Copy a piece to another rank; both must be declared to hold the same tokens and heads."""
        values = self.read(source, taken)
        self.expect_same(source, taken, target, given)
        self.write(target, given, values)

    def expect_same(self, source: int, taken: Piece, target: int, given: Piece) -> None:
        have, want = self.buffer(source, taken), self.buffer(target, given)
        if have.kind is not want.kind or have.precision is not want.precision:
            raise Broken(
                target,
                f"receives {have.kind} ({have.precision}) of rank {source} "
                f"into {given.buffer}, which holds {want.kind} ({want.precision})",
            )
        if self.where(source, taken).labels != self.where(target, given).labels:
            raise Broken(
                target,
                f"receives other tokens or heads from rank {source} than {given.buffer} holds",
            )

    def free(self, rank: int, name: str) -> None:
        if self.tables[rank][name].role is not Role.WORKSPACE:
            raise Broken(rank, f"frees {name}, which belongs to the caller")
        if self._cells[rank].pop(name, None) is None:
            raise Broken(rank, f"frees {name}, which holds nothing")
        self._freed[rank].add(name)

    def leaks(self, rank: int) -> list[str]:
        table = self.tables[rank]
        return [name for name in self._cells[rank] if table[name].role is Role.WORKSPACE]

    def outputs(self, rank: int) -> list[tuple[Buffer, list[Value | None]]]:
        return [
            (b, self._cells[rank].get(b.name) or [None] * self.atoms.num_cells(b))
            for b in self.tables[rank].values()
            if b.role is Role.OUTPUT
        ]

    def is_final(self, kind: Kind, values: list[Value]) -> bool:
        return all(value is DATA for value in values)
