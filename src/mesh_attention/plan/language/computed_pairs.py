"""Who computes how many (query, key) pairs: read from the kernel calls of a plan's programs.

Each call becomes blocks of (Q partitions) x (KV partitions) with the number of visible pairs in
every cell. The assignment matrix, the balance of work and the seconds of calls come from these.
`pairs_of_tiles` answers the same for the tiles of a mesh, without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attention, Call, CallKind, Task
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, num_visible, visible_pairs
from mesh_attention.plan.problem.spans import Spans, slice_spans

Array = NDArray[np.int64]


class OwnedRows:
    """Rows at some places, by the partition that owns them."""

    def __init__(self, layout: Layout, places: Spans) -> None:
        slots = layout.slots
        owners: list[int] = []
        self._layout = layout
        self._stretches: list[tuple[int, int]] = []
        for start, stop in places:
            for partition in range(start // slots, -(-stop // slots)):
                owners.append(partition)
                inside = max(start, partition * slots), min(stop, (partition + 1) * slots)
                self._stretches.append(inside)
        self.partitions, self._index = np.unique(
            np.array(owners, dtype=np.int64), return_inverse=True
        )

    def counts(self) -> Array:
        """Rows of each partition."""
        return self._add_up(np.array([b - a for a, b in self._stretches], dtype=np.int64))

    def visible_pairs(self, keys: OwnedRows, mask: RowRanges) -> Array:
        """Between each partition of these rows and each of the keys'."""
        q_runs, q_starts = self._runs()
        k_runs, k_starts = keys._runs()
        by_run = visible_pairs(q_runs, k_runs, mask)
        by_stretch = np.add.reduceat(np.add.reduceat(by_run, q_starts, axis=0), k_starts, axis=1)
        return keys._add_up(self._add_up(by_stretch).T).T

    def _runs(self) -> tuple[list[Run], list[int]]:
        """The positions of all rows, and where the runs of each stretch begin."""
        runs: list[Run] = []
        starts = []
        for stretch in self._stretches:
            starts.append(len(runs))
            runs += self._layout.runs(*stretch)
        return runs, starts

    def _add_up(self, by_stretch: Array) -> Array:
        total = np.zeros((len(self.partitions), *by_stretch.shape[1:]), dtype=np.int64)
        np.add.at(total, self._index, by_stretch)
        return total


@dataclass(frozen=True, slots=True)
class Work:
    """`pairs[i, j]` visible pairs between Q partition q[i] and KV partition kv[j], on one rank."""

    rank: int
    q: Array
    kv: Array
    pairs: Array


def work_of(
    plan: Plan, pass_: Pass, *, whole_tasks: bool = False, head: int | None = None
) -> Iterator[Work]:
    """One item for each kernel call; `whole_tasks` gives one for each task, in place of its calls,
    with a 1 for every cell the task spans, whatever the mask shows of it. `head` leaves out the
    work of other query heads."""

    @cache
    def rows(layout: Layout, buffer: Buffer, start: int, stop: int) -> OwnedRows:
        return OwnedRows(layout, slice_spans(buffer.rows, start, stop))

    for program in pass_.programs:
        table = program.buffer_table()
        for op in program.operations:
            if not isinstance(op, Attention):
                continue
            q_buffer, k_buffer = table[op.q.buffer], table[op.k.buffer]
            if head is not None and head not in heads_of(op, q_buffer):
                continue
            if whole_tasks:
                q = rows(plan.q_layout, q_buffer, op.q.start, op.q.stop)
                k = rows(plan.kv_layout, k_buffer, op.k.start, op.k.stop)
                spanned = np.ones((len(q.partitions), len(k.partitions)), dtype=np.int64)
                yield Work(program.rank, q.partitions, k.partitions, spanned)
                continue
            for call in op.calls:
                q_first, k_first = op.q.start, op.k.start
                q = rows(plan.q_layout, q_buffer, q_first + call.q_start, q_first + call.q_stop)
                k = rows(plan.kv_layout, k_buffer, k_first + call.k_start, k_first + call.k_stop)
                if call.kind is CallKind.FULL:
                    pairs = np.outer(q.counts(), k.counts())
                else:
                    pairs = q.visible_pairs(k, plan.problem.rows)
                yield Work(program.rank, q.partitions, k.partitions, pairs)


def heads_of(op: Attention, queries: Buffer) -> range:
    """Query heads of an attention."""
    first = queries.heads[0]
    if op.q.heads is None:
        return range(*queries.heads)
    return range(first + op.q.heads[0], first + op.q.heads[1])


def pairs_of_tasks(plan: Plan, pass_: Pass) -> Iterator[tuple[int, Task, float]]:
    """(rank, task, visible pairs of its calls); a task on half of the heads counts half."""
    pairs_of = CallPairs(plan)
    for program in pass_.programs:
        table = program.buffer_table()
        for op in program.operations:
            if isinstance(op, Attention):
                share = op.q.num_heads(table[op.q.buffer]) / plan.problem.num_heads
                pairs = sum(pairs_of(op, table, call) for call in op.calls)
                yield program.rank, op.task, share * pairs


class CallPairs:
    """Visible pairs of a kernel call. Remembers what it counted: ranks of one group hold the same
    rows."""

    def __init__(self, plan: Plan) -> None:
        q_runs, k_runs = (
            cache(lambda spans, layout=layout: _join([r for at in spans for r in layout.runs(*at)]))
            for layout in (plan.q_layout, plan.kv_layout)
        )
        rows = plan.problem.rows
        self._count: Callable[[Spans, Spans], int] = lambda q, k: num_visible(
            q_runs(q), k_runs(k), rows
        )
        self._known: dict[tuple[Spans, Spans], int] = {}

    def __call__(self, op: Attention, table: Mapping[str, Buffer], call: Call) -> int:
        height, width = call.q_stop - call.q_start, call.k_stop - call.k_start
        if call.kind is CallKind.FULL:
            return height * width
        if call.kind is CallKind.CAUSAL:
            return height * (height + 1) // 2
        rows = self._rows(op, table, call)
        pairs = self._known.get(rows)
        if pairs is None:
            pairs = self._known[rows] = self._count(*rows)
        return pairs

    def know(self, op: Attention, table: Mapping[str, Buffer], call: Call, pairs: int) -> None:
        """Of a call whose pairs somebody has counted, as those of others together."""
        self._known[self._rows(op, table, call)] = pairs

    @staticmethod
    def _rows(op: Attention, table: Mapping[str, Buffer], call: Call) -> tuple[Spans, Spans]:
        q, k = op.q.start, op.k.start
        return (
            slice_spans(table[op.q.buffer].rows, q + call.q_start, q + call.q_stop),
            slice_spans(table[op.k.buffer].rows, k + call.k_start, k + call.k_stop),
        )


def _join(runs: list[Run]) -> list[Run]:
    """Neighbouring partitions of a striped layout are one strided run of wider blocks: what a Q
    group gathered is counted as one run and not as many.

    >>> _join([Run(0, 1, 8, 4), Run(1, 1, 8, 4)])
    [Run(start=0, block=2, stride=8, count=4)]
    """
    joined: list[Run] = []
    for run in sorted(runs, key=lambda r: r.start):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.count == run.count > 1
            and last.stride == run.stride
            and last.start + last.block == run.start
            and last.block + run.block <= run.stride
        ):
            joined[-1] = Run(last.start, last.block + run.block, run.stride, run.count)
        else:
            joined.append(run)
    return joined


@dataclass(frozen=True, slots=True)
class Balance:
    """Visible pairs (over all heads) of the busiest rank and of the mean one."""

    mean: float
    max: float

    @property
    def ratio(self) -> float:
        """1.0 is perfect balance, and what a plan without any visible pair has."""
        return self.max / self.mean if self.mean else 1.0


def balance(plan: Plan, pass_: Pass) -> Balance:
    pairs = [0.0] * plan.num_ranks
    for rank, _, count in pairs_of_tasks(plan, pass_):
        pairs[rank] += count
    return Balance(sum(pairs) / len(pairs), max(pairs))


def pairs_of_tiles(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: tuple[int, int], degree: int = 1
) -> NDArray[np.int64]:
    """Visible pairs of the tile of each row and column of units of `degree` ranks, (b, a); of
    contiguous or zigzag layouts."""
    a, b = tile
    q_runs = [run for row in range(b) for run in _runs(q_layout, row * a, 1, a, degree)]
    k_runs = [run for column in range(a) for run in _runs(kv_layout, column, a, b, degree)]
    pairs = visible_pairs(q_runs, k_runs, rows)
    parts = len(q_runs) // b
    summed: NDArray[np.int64] = pairs.reshape(b, parts, a, parts).sum((1, 3))
    return summed


def _runs(layout: Layout, first: int, step: int, count: int, degree: int) -> list[Run]:
    """The positions of units `first`, `first + step` and so on: as few runs as there are blocks of
    a rank."""
    size, units = layout.slots * degree, layout.num_ranks // degree
    starts = [first * size]
    if layout.kind is LayoutKind.ZIGZAG:
        size //= 2
        last = 2 * units - 1 - first - (count - 1) * step
        starts = [first * size, last * size]
    if step == 1:
        return [Run(start, count * size) for start in starts]
    return [Run(start, size, step * size, count) for start in starts]
