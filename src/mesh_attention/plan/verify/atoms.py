"""Atoms: the finest cuts of tokens and heads that any buffer or piece of a plan makes.

Every buffer row range is then a list of whole atoms, and a set of keys that a query has seen is an
integer with one bit for each key atom: unions and overlaps are single operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.mask import RowRanges
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import reads, writes
from mesh_attention.plan.runs import Run, visible_pairs

__all__ = ["Atoms", "Cells", "Side"]


@dataclass(frozen=True, slots=True)
class Cells:
    """Where a piece lies in its buffer's list of cells, and what each cell is meant to hold."""

    index: tuple[int, ...]
    labels: tuple[tuple[int, int], ...]  # (token atom, head atom)


class Side:
    """Token atoms of one side: the boundaries, and which atoms an interval of places consists of."""

    def __init__(self, layout: Layout, cuts: Iterable[int]) -> None:
        slots, halves = layout.slots, layout.halves
        own = {rank * slots + h for rank in range(layout.num_ranks) for h in halves}
        self.layout = layout
        self.cuts = sorted(own | set(cuts))
        self._index = {cut: i for i, cut in enumerate(self.cuts)}

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def of(self, start: int, stop: int) -> range:
        return range(self._index[start], self._index[stop])

    def sizes(self) -> NDArray[np.int64]:
        return np.diff(np.array(self.cuts, dtype=np.int64))


class Atoms:
    """All atoms of one pass, with the visible pairs between every two of them."""

    def __init__(self, plan: Plan, one: Pass) -> None:
        token_cuts: tuple[set[int], set[int]] = (set(), set())
        head_cuts = {0, plan.problem.num_heads}
        group = plan.problem.heads_per_kv_head
        for buffer, piece in _distinct(one):
            side = int(buffer.kind.is_key_side)
            per_head = group if side else 1
            token_cuts[side].update(e for span in buffer.rows for e in span)
            token_cuts[side].update(e for span in piece.spans(buffer) for e in span)
            first = buffer.heads[0]
            inside = piece.heads or (0, buffer.num_heads)
            ends = (*buffer.heads, first + inside[0], first + inside[1])
            head_cuts.update(end * per_head for end in ends)
        # Where query heads of one KV head are parted, the KV head itself must be an atom.
        head_cuts |= {cut - cut % group for cut in head_cuts}
        head_cuts |= {cut + -cut % group for cut in head_cuts}
        self.q = Side(plan.q_layout, token_cuts[0])
        self.kv = Side(plan.kv_layout, token_cuts[1])
        self.head_cuts = sorted(head_cuts)
        self.num_heads = len(self.head_cuts) - 1
        self._head_index = {cut: i for i, cut in enumerate(self.head_cuts)}
        self._heads_per_kv_head = group
        # A KV head atom is named by its first query head atom; cut within a group they coincide.
        self.kv_head_of = [
            self._head_index[cut - cut % group] for cut in self.head_cuts[:-1]
        ]
        self.pairs = _pair_matrix(self.q, self.kv, plan.problem.rows)
        self._cells: dict[tuple[int, Piece], Cells] = {}
        self._buffers: dict[int, tuple[list[int], list[int]]] = {}
        self._alive: list[Buffer] = []
        seen = self.pairs > 0
        self.required = [_bits(row) for row in seen]
        by_head = np.repeat(seen.T, self.num_heads, axis=1)
        self.required_by_key = [_bits(row) for row in by_head]

    def heads(self, buffer: Buffer) -> list[int]:
        """Head atoms of a buffer; on the key side, the first query head atom of each KV head."""
        return self._layout_of(buffer)[1]

    def num_cells(self, buffer: Buffer) -> int:
        atoms, heads = self._layout_of(buffer)
        return len(atoms) * len(heads)

    def head_bits(self, kv_head: int) -> int:
        """Of the bits `query atom * num_heads + head atom`, those of one KV head's queries."""
        heads = sum(1 << h for h, k in enumerate(self.kv_head_of) if k == kv_head)
        return sum(heads << (a * self.num_heads) for a in range(len(self.q)))

    def cells(self, buffer: Buffer, piece: Piece) -> Cells:
        key = (id(buffer), piece)
        found = self._cells.get(key)
        if found is None:
            found = self._cells[key] = self._find_cells(buffer, piece)
        return found

    def _find_cells(self, buffer: Buffer, piece: Piece) -> Cells:
        atoms, heads = self._layout_of(buffer)
        side = self.kv if buffer.kind.is_key_side else self.q
        per_head = self._heads_per_kv_head if buffer.kind.is_key_side else 1
        low, high = piece.heads or (0, buffer.num_heads)
        first, last = (self._head_index[(buffer.heads[0] + h) * per_head] for h in (low, high))
        wanted = [i for i, head in enumerate(heads) if first <= head < last]
        index, labels, row = [], [], 0
        for at, atom in enumerate(atoms):
            if piece.start <= row < piece.stop:
                index += [at * len(heads) + i for i in wanted]
                labels += [(atom, heads[i]) for i in wanted]
            row += side.cuts[atom + 1] - side.cuts[atom]
        return Cells(tuple(index), tuple(labels))

    def _layout_of(self, buffer: Buffer) -> tuple[list[int], list[int]]:
        found = self._buffers.get(id(buffer))
        if found is None:
            key_side = buffer.kind.is_key_side
            side = self.kv if key_side else self.q
            per_head = self._heads_per_kv_head if key_side else 1
            atoms = [atom for span in buffer.rows for atom in side.of(*span)]
            first, last = (self._head_index[h * per_head] for h in buffer.heads)
            heads = list(range(first, last))
            if key_side:
                heads = sorted({self.kv_head_of[h] for h in heads})
            found = self._buffers[id(buffer)] = (atoms, heads)
            self._alive.append(buffer)  # ids stay unique while we hold the object
        return found


def _distinct(one: Pass) -> Iterator[tuple[Buffer, Piece]]:
    """Every (buffer, piece) that occurs; objects that ranks share are looked at once."""
    known: set[tuple[int, Piece]] = set()
    for program in one.programs:
        table = program.buffer_table()
        for op in program.operations:
            for piece in (*reads(op), *writes(op)):
                buffer = table[piece.buffer]
                key = (id(buffer), piece)
                if key not in known:
                    known.add(key)
                    yield buffer, piece


def _pair_matrix(q: Side, kv: Side, rows: RowRanges) -> NDArray[np.int64]:
    q_owner, q_runs = _runs(q)
    kv_owner, kv_runs = _runs(kv)
    pairs = visible_pairs(q_runs, kv_runs, rows)
    if len(q_runs) == len(q) and len(kv_runs) == len(kv):
        return pairs
    by_q = np.zeros((len(q), len(kv_runs)), dtype=np.int64)
    np.add.at(by_q, np.array(q_owner), pairs)
    result = np.zeros((len(kv), len(q)), dtype=np.int64)
    np.add.at(result, np.array(kv_owner), by_q.T)
    return result.T


def _runs(side: Side) -> tuple[list[int], list[Run]]:
    owners: list[int] = []
    runs: list[Run] = []
    for atom in range(len(side)):
        for run in side.layout.runs(side.cuts[atom], side.cuts[atom + 1]):
            owners.append(atom)
            runs.append(run)
    return owners, runs


def _bits(row: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
