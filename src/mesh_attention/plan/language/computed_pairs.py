"""Who computes how many (query, key) pairs: read from the kernel calls of a plan's programs.

The balance of work and the seconds of calls come from these. `pairs_of_tiles` answers the same for
the tiles of a mesh, without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attention, Call, Task
from mesh_attention.plan.problem.block_pairs import pairs_of_blocks
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, num_visible, pairs_of_parts
from mesh_attention.plan.problem.spans import Spans, slice_spans, union

Array = NDArray[np.int64]


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
    """Visible pairs of kernel calls, each counted once: ranks of one group hold the same rows."""

    def __init__(self, plan: Plan) -> None:
        self._layouts, self._mask = (plan.q_layout, plan.kv_layout), plan.problem.rows
        # By identity: the hash of many stretches takes long. The stretches are kept too, so that no
        # others get the same identity.
        self._by_rows: dict[tuple[int, ...], tuple[int, Spans, Spans]] = {}

    def __call__(
        self, op: Attention, table: Mapping[str, Buffer], call: Call, known: int | None = None
    ) -> int:
        """`known`: the pairs, where they were counted elsewhere, as a sum over other calls; they
        are remembered."""
        if call.num_pairs is not None:
            return call.num_pairs
        height, width = call.size
        q_rows, k_rows = table[op.q.buffer].rows, table[op.k.buffer].rows
        q, k = op.q.start + call.q_start, op.k.start + call.k_start
        key = id(q_rows), q, height, id(k_rows), k, width
        counted = self._by_rows.get(key)
        if counted is None:
            pairs = known
            if pairs is None:
                whole_q = height == table[op.q.buffer].num_rows
                queries = q_rows if whole_q else slice_spans(q_rows, q, q + height)
                whole_k = width == table[op.k.buffer].num_rows
                keys = k_rows if whole_k else slice_spans(k_rows, k, k + width)
                pairs = pairs_of_rows(*self._layouts, queries, keys, self._mask)
            counted = self._by_rows[key] = pairs, q_rows, k_rows
        return counted[0]


@lru_cache(maxsize=512)  # the passes and the cuts of a search ask for the same
def pairs_of_rows(
    q_layout: Layout, kv_layout: Layout, queries: Spans, keys: Spans, mask: RowRanges
) -> int:
    """Visible pairs of the queries and the keys at these places."""
    if LayoutKind.STRIPED in (q_layout.kind, kv_layout.kind):
        return num_visible(_runs_of(q_layout, queries), _runs_of(kv_layout, keys), mask)
    return pairs_of_blocks(_blocks_of(q_layout, queries), _blocks_of(kv_layout, keys), mask)


@lru_cache(maxsize=512)
def _blocks_of(layout: Layout, spans: Spans) -> Array:
    """Starts and stops of the blocks of positions at these places, in order."""
    edges = layout.edges_of(spans)
    assert edges is not None, "runs of striped layouts are counted otherwise"
    return np.stack(union(*edges), axis=1)


@lru_cache(maxsize=512)
def _runs_of(layout: Layout, spans: Spans) -> list[Run]:
    return _join([run for span in spans for run in layout.runs(*span)])


def _join(runs: list[Run]) -> list[Run]:
    """Runs of neighbouring partitions of a striped layout as one run of wider blocks, so that what
    a Q group gathered is counted as one run.

    >>> _join([Run(0, 1, 8, 4), Run(1, 1, 8, 4)])
    [Run(start=0, block=2, stride=8, count=4)]
    """
    wide: list[Run] = []
    for run in sorted(runs, key=lambda r: r.start):
        last = wide[-1] if wide else run
        wider = Run(last.start, last.block + run.block, run.stride, run.count)
        touches = last.start + last.block == run.start and wider.block <= run.stride
        if touches and last.stride == run.stride and last.count == run.count > 1:
            wide[-1] = wider
        else:
            wide.append(run)
    return wide


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
) -> Array:
    """Visible pairs of each tile of an a x b mesh of units of `degree` ranks, as an array (b, a).
    Layouts are contiguous or zigzag."""
    if q_layout.order is not None and kv_layout.order is not None:
        return pairs_of_many_tiles(q_layout, kv_layout, rows, tile, degree)
    a, b = tile
    q_parts = [_runs(q_layout, row * a, 1, a, degree) for row in range(b)]
    k_parts = [_runs(kv_layout, column, a, b, degree) for column in range(a)]
    return pairs_of_parts(q_parts, k_parts, rows)


def pairs_of_many_tiles(
    q_layout: Layout, kv_layout: Layout, rows: RowRanges, tile: tuple[int, int], degree: int = 1
) -> Array:
    """The same, faster where many tiles are asked for: pairs of all partitions are added up."""
    a, b = tile
    in_order = (replace(layout, order=None) for layout in (q_layout, kv_layout))
    pairs = _pairs_of_partitions(*in_order, rows)
    ranks = range(q_layout.num_ranks)
    q_order, k_order = (np.array(x.order or ranks) for x in (q_layout, kv_layout))
    by_row = np.add.reduceat(pairs[q_order], ranks[:: a * degree])
    columns = k_order.reshape(b, a, degree).swapaxes(0, 1).ravel()
    of_tiles: Array = np.add.reduceat(by_row[:, columns], ranks[:: b * degree], axis=1)
    return of_tiles


@lru_cache(maxsize=8)  # for all tiles, degrees and orders
def _pairs_of_partitions(q_layout: Layout, kv_layout: Layout, rows: RowRanges) -> Array:
    ranks = range(q_layout.num_ranks)
    q_parts, k_parts = (
        [layout.runs(rank * layout.slots, (rank + 1) * layout.slots) for rank in ranks]
        for layout in (q_layout, kv_layout)
    )
    return pairs_of_parts(q_parts, k_parts, rows)


def _runs(layout: Layout, first: int, step: int, count: int, degree: int) -> list[Run]:
    """The positions of units `first`, `first + step` and so on, as one run for each block that a
    rank has."""
    size, units = layout.slots * degree, layout.num_ranks // degree
    starts = [first * size]
    if layout.kind is LayoutKind.ZIGZAG:
        size //= 2
        last = 2 * units - 1 - first - (count - 1) * step
        starts = [first * size, last * size]
    if step == 1:
        return [Run(start, count * size) for start in starts]
    return [Run(start, size, step * size, count) for start in starts]
