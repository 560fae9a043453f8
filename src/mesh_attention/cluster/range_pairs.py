"""Visible pairs of a row-range call, in closed form.

Neighbouring partitions of a striped layout are one strided run of wider blocks, so the rows that a
Q group gathered are counted as one run and not as many.
"""

from __future__ import annotations

from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.layout import Layout, Spans, slice_spans
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Call
from mesh_attention.plan.runs import Run, visible_pairs

__all__ = ["RangePairs"]


class RangePairs:
    """Remembers what it counted: ranks of one group hold the same rows."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows = plan.problem.rows
        self._runs: dict[tuple[bool, Spans], tuple[Run, ...]] = {}
        self._pairs: dict[tuple[Spans, Spans], int] = {}

    def __call__(self, q: Piece, q_buffer: Buffer, k: Piece, k_buffer: Buffer, call: Call) -> int:
        queries = slice_spans(q_buffer.rows, q.start + call.q_start, q.start + call.q_stop)
        keys = slice_spans(k_buffer.rows, k.start + call.k_start, k.start + call.k_stop)
        found = self._pairs.get((queries, keys))
        if found is None:
            q_runs = self._runs_of(False, queries, self._plan.q_layout)
            k_runs = self._runs_of(True, keys, self._plan.kv_layout)
            found = int(visible_pairs(q_runs, k_runs, self._rows).sum())
            self._pairs[queries, keys] = found
        return found

    def _runs_of(self, key_side: bool, spans: Spans, layout: Layout) -> tuple[Run, ...]:
        known = self._runs.get((key_side, spans))
        if known is None:
            slots = layout.slots
            runs: list[Run] = []
            for start, stop in spans:
                for partition in range(start // slots, -(-stop // slots)):
                    first = max(start, partition * slots)
                    runs += layout.runs(first, min(stop, (partition + 1) * slots))
            known = self._runs[key_side, spans] = tuple(_join(runs))
        return known


def _join(runs: list[Run]) -> list[Run]:
    """
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
