"""Who really computes which (query, key) pairs: read from the kernel calls of a plan's programs.

Each task becomes blocks of (Q partitions) x (KV partitions) with the number of visible pairs in
every cell. The assignment matrix, the balance of work and the costs of tasks all come from these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import Attend, AttendBackward, CallKind
from mesh_attention.plan.runs import Run, visible_pairs

__all__ = ["Balance", "Rows", "Work", "balance", "work_of"]

Array = NDArray[np.int64]


class Rows:
    """Some rows of a buffer, by the partition that owns them."""

    def __init__(self, layout: Layout, piece: Piece, buffer: Buffer) -> None:
        self.runs: list[Run] = []
        owners: list[int] = []
        for start, stop in piece.spans(buffer):
            while start < stop:
                partition = start // layout.slots
                end = min(stop, (partition + 1) * layout.slots)
                found = layout.runs(start, end)
                self.runs += found
                owners += [partition] * len(found)
                start = end
        self.partitions, self._index = np.unique(
            np.array(owners, dtype=np.int64), return_inverse=True
        )

    def counts(self) -> Array:
        """Rows of each partition."""
        sizes = np.array([run.num_tokens for run in self.runs], dtype=np.int64)
        return self.add_up(sizes)

    def add_up(self, by_run: Array) -> Array:
        """Sums over the runs of each partition, along the first axis."""
        total = np.zeros((len(self.partitions), *by_run.shape[1:]), dtype=np.int64)
        np.add.at(total, self._index, by_run)
        return total


@dataclass(frozen=True, slots=True)
class Work:
    """`pairs[i, j]` visible pairs between Q partition q[i] and KV partition kv[j], on one rank.

    `share` is the part of all query heads that the task works on.
    """

    rank: int
    task: str
    q: Array
    kv: Array
    pairs: Array
    share: float


def work_of(plan: Plan, one: Pass, *, whole_tasks: bool = False) -> Iterator[Work]:
    """One item for each kernel call; `whole_tasks` gives one for each task, in place of its calls,
    with a 1 for every cell the task spans, whatever the mask shows of it."""
    known: dict[tuple[int, int, int], Rows] = {}
    rows_of_mask = plan.problem.rows

    def rows(layout: Layout, buffer: Buffer, start: int, stop: int) -> Rows:
        key = (id(buffer), start, stop)  # the plan keeps its buffers alive
        if key not in known:
            known[key] = Rows(layout, Piece(buffer.name, start, stop), buffer)
        return known[key]

    for program in one.programs:
        table = program.buffer_table()
        for op in program.operations:
            if not isinstance(op, Attend | AttendBackward):
                continue
            q_buffer, k_buffer = table[op.q.buffer], table[op.k.buffer]
            heads = op.q.heads or (0, q_buffer.num_heads)
            share = (heads[1] - heads[0]) / plan.problem.num_heads
            if whole_tasks:
                q = rows(plan.q_layout, q_buffer, op.q.start, op.q.stop)
                k = rows(plan.kv_layout, k_buffer, op.k.start, op.k.stop)
                spanned = np.ones((len(q.partitions), len(k.partitions)), dtype=np.int64)
                yield Work(program.rank, op.name, q.partitions, k.partitions, spanned, share)
                continue
            for call in op.calls:
                q = rows(
                    plan.q_layout, q_buffer, op.q.start + call.q_start, op.q.start + call.q_stop
                )
                k = rows(
                    plan.kv_layout, k_buffer, op.k.start + call.k_start, op.k.start + call.k_stop
                )
                if call.kind is CallKind.FULL:
                    pairs = np.outer(q.counts(), k.counts())
                else:
                    by_run = visible_pairs(q.runs, k.runs, rows_of_mask)
                    pairs = k.add_up(q.add_up(by_run).T).T
                yield Work(program.rank, op.name, q.partitions, k.partitions, pairs, share)


@dataclass(frozen=True, slots=True)
class Balance:
    """Visible pairs (over all heads) of the busiest rank and of the mean one."""

    mean: float
    max: float

    @property
    def ratio(self) -> float:
        """1.0 is perfect balance, and what a plan without any visible pair has."""
        return self.max / self.mean if self.mean else 1.0


def balance(plan: Plan, one: Pass) -> Balance:
    pairs = [0.0] * plan.num_ranks
    for work in work_of(plan, one):
        pairs[work.rank] += work.share * int(work.pairs.sum())
    return Balance(sum(pairs) / len(pairs), max(pairs))
