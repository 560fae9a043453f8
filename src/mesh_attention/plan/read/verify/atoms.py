"""Atoms: the finest cuts of tokens and heads that any buffer or piece of a plan makes.

The verifier works on them in place of tokens. The rows of every buffer and piece are whole atoms,
and the set of keys that a query has seen is an integer with one bit for each key atom: unions and
overlaps are single operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.buffers import Buffer, Piece
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import AllGather, Operation, ReduceScatter, reads, writes
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.runs import Run, pairs_of_parts
from mesh_attention.plan.problem.spans import Spans


@dataclass(frozen=True, slots=True, eq=False)
class BufferCells:
    """The cells of a buffer and what each is meant to hold, token atom by token atom. Buffers of
    one side with the same rows and heads share one object on all ranks, compared by identity."""

    labels: list[tuple[int, int]]  # (token atom, head atom)
    first_rows: list[int]  # the first row of each token atom
    heads: list[int]  # head atoms; on the key side the first query head atom of each KV head
    # Where the cells of pieces lie, by rows and heads of the piece: remembered by `Memory`.
    of_pieces: dict[object, slice | tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


class AtomSide:
    """Token atoms of one side: the boundaries, and which atoms an interval of places is made of."""

    def __init__(self, layout: Layout, cuts: Iterable[int]) -> None:
        slots, halves = layout.slots, layout.halves
        own = {rank * slots + h for rank in range(layout.num_ranks) for h in halves}
        self.layout = layout
        self.cuts = sorted(own | set(cuts))
        self._index = {cut: i for i, cut in enumerate(self.cuts)}

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def runs(self) -> list[list[Run]]:
        """The positions of each atom."""
        return [self.layout.runs(start, stop) for start, stop in pairwise(self.cuts)]

    def has_token(self, atom: int) -> bool:
        runs = self.layout.runs(self.cuts[atom], self.cuts[atom + 1])
        return any(run.start < self.layout.num_tokens for run in runs)

    def of(self, start: int, stop: int) -> range:
        return range(self._index[start], self._index[stop])


class Atoms:
    """All atoms of one pass, with the visible pairs between every two of them."""

    def __init__(self, plan: Plan, pass_: Pass) -> None:
        token_cuts: tuple[set[int], set[int]] = (set(), set())
        head_cuts = {0, plan.problem.num_heads}
        group = plan.problem.heads_per_kv_head
        for buffer, (rows, heads) in _cuts_by_buffer(pass_).items():
            side = int(buffer.kind.is_key_side)
            per_head = group if side else 1
            token_cuts[side].update(e for span in buffer.rows for e in span)
            head_cuts.update(head * per_head for head in buffer.heads)
            offsets = list(accumulate((b - a for a, b in buffer.rows), initial=0))
            for row in rows.difference(offsets):  # ends of spans are cuts already
                at = bisect_right(offsets, row) - 1
                token_cuts[side].add(buffer.rows[at][0] + row - offsets[at])
            head_cuts.update((buffer.heads[0] + head) * per_head for head in heads)
        # Where query heads of one KV head are parted, the KV head itself must be an atom.
        head_cuts |= {cut - cut % group for cut in head_cuts}
        head_cuts |= {cut + -cut % group for cut in head_cuts}
        self.q = AtomSide(plan.q_layout, token_cuts[0])
        self.kv = AtomSide(plan.kv_layout, token_cuts[1])
        self.head_cuts = sorted(head_cuts)
        self.num_heads = len(self.head_cuts) - 1
        self._head_index = {cut: i for i, cut in enumerate(self.head_cuts)}
        self._heads_per_kv_head = group
        # A KV head atom is named by its first query head atom; cut within a group they coincide.
        self.kv_head_of = [self._head_index[cut - cut % group] for cut in self.head_cuts[:-1]]
        self.pairs = pairs_of_parts(self.q.runs(), self.kv.runs(), plan.problem.rows)
        self._cells_of = cache(self._make_cells)
        seen = self.pairs > 0
        self.required = [_bits(row) for row in seen]
        by_head = np.repeat(seen.T, self.num_heads, axis=1)
        self.required_by_key = [_bits(row) for row in by_head]

    def head_bits(self, kv_head: int) -> int:
        """The bits `query atom * num_heads + head atom` of all queries of a KV head."""
        heads = sum(1 << h for h, k in enumerate(self.kv_head_of) if k == kv_head)
        return sum(heads << (a * self.num_heads) for a in range(len(self.q)))

    def cells(self, buffer: Buffer) -> BufferCells:
        return self._cells_of(buffer.kind.is_key_side, buffer.rows, buffer.heads)

    def _make_cells(self, key_side: bool, rows: Spans, held: tuple[int, int]) -> BufferCells:
        side = self.kv if key_side else self.q
        atoms = [atom for span in rows for atom in side.of(*span)]
        sizes = (side.cuts[atom + 1] - side.cuts[atom] for atom in atoms)
        per_head = self._heads_per_kv_head if key_side else 1
        first, last = (self._head_index[head * per_head] for head in held)
        heads = list(range(first, last))
        if key_side:
            heads = sorted({self.kv_head_of[h] for h in heads})
        labels = [(atom, head) for atom in atoms for head in heads]
        return BufferCells(labels, list(accumulate(sizes, initial=0))[:-1], heads)

    def head_atom(self, buffer: Buffer, head: int) -> int:
        """The head atom that begins at a head, counted inside the buffer."""
        per_head = self._heads_per_kv_head if buffer.kind.is_key_side else 1
        return self._head_index[(buffer.heads[0] + head) * per_head]


_Cuts = tuple[set[int], set[int]]  # rows and heads at which pieces of a buffer begin or end


def _cuts_by_buffer(pass_: Pass) -> dict[Buffer, _Cuts]:
    """Every buffer with the cuts that pieces make; what ranks share is looked at once."""
    used_by: dict[Operation, dict[str, _Cuts]] = {}
    cuts_of: dict[Buffer, _Cuts] = {}
    for program in pass_.programs:
        table = program.buffer_table()
        for op in program.operations:
            used = used_by.get(op)
            if used is None:
                used = used_by[op] = {}
                for piece in (*reads(op), *writes(op), *_cut_parts(op)):
                    rows, heads = used.setdefault(piece.buffer, (set(), set()))
                    rows.add(piece.start)
                    rows.add(piece.stop)
                    heads.update(piece.heads or ())
            for name, cuts in used.items():
                all_rows, all_heads = cuts_of.setdefault(table[name], (set(), set()))
                all_rows |= cuts[0]
                all_heads |= cuts[1]
    return cuts_of


def _cut_parts(op: Operation) -> list[Piece]:
    """The stretches that a collective takes apart, so that a wrong cut moves whole atoms."""
    moves = op.moves if isinstance(op, AllGather | ReduceScatter) else ()
    return [move.part.cut(a, b) for move in moves for a, b in pairwise(move.cuts)]


def _bits(row: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
