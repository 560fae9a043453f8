"""Do the kernel calls of a task compute its visible pairs, all of them and each once?

A full rectangle must be visible in all of it, a causal square must lie exactly on the mask's edge,
and a row range computes what the mask shows by definition. So if the calls are disjoint and their
pairs add up to the visible pairs of the task, they are the task.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from mesh_attention.plan.language.program import Call, CallKind
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, num_visible
from mesh_attention.plan.problem.spans import Spans


class RowMap:
    """Positions of the rows of a piece, without writing them all down."""

    def __init__(self, layout: Layout, spans: Spans) -> None:
        self._runs = [run for span in spans for run in layout.runs(*span)]
        ends = np.cumsum([run.num_tokens for run in self._runs])
        self.num_rows = int(ends[-1]) if len(ends) else 0
        self._stops = ends
        self._starts = ends - [run.num_tokens for run in self._runs]
        self._whole: tuple[int, int] | None = None

    def parts(self, start: int, stop: int) -> list[tuple[Run, int, int]]:
        """The runs of rows `start..stop`, each with its first and last index inside the run."""
        first = int(np.searchsorted(self._stops, start, side="right"))
        parts = []
        for run, row in zip(self._runs[first:], self._starts[first:].tolist(), strict=True):
            if row >= stop:
                break
            parts.append((run, max(start - row, 0), min(stop - row, run.num_tokens) - 1))
        return parts

    def extremes(self, start: int, stop: int) -> tuple[int, int]:
        """Smallest and largest position of these rows."""
        whole = start == 0 and stop == self.num_rows
        if whole and self._whole is not None:
            return self._whole
        parts = self.parts(start, stop)
        ends = (min(_at(r, a) for r, a, _ in parts), max(_at(r, b) for r, _, b in parts))
        if whole:
            self._whole = ends
        return ends

    def runs(self, start: int, stop: int) -> list[Run]:
        """The rows as runs (a cut run is given block by block)."""
        runs = []
        for run, a, b in self.parts(start, stop):
            if a == 0 and b == run.num_tokens - 1:
                runs.append(run)
                continue
            for m in range(a // run.block, b // run.block + 1):
                low = max(a - m * run.block, 0)
                high = min(b - m * run.block, run.block - 1)
                runs.append(Run(run.start + m * run.stride + low, high - low + 1))
        return runs

    def consecutive(self, start: int, stop: int) -> bool:
        """Do the positions grow by one from row to row?"""
        position = None
        for run in self.runs(start, stop):
            for first, last in run.blocks():
                if position is not None and first != position:
                    return False
                position = last
        return True


def _at(run: Run, index: int) -> int:
    block, within = divmod(index, run.block)
    return run.start + block * run.stride + within


class CallCheck:
    def __init__(self, rows: RowRanges) -> None:
        self._rows = rows

    def check(self, q: RowMap, k: RowMap, calls: tuple[Call, ...], visible: int) -> str | None:
        """What is wrong with these calls for a task with so many visible pairs; None if nothing."""
        total = 0
        for call in calls:
            inside = 0 <= call.q_start < call.q_stop <= q.num_rows
            if not inside or not 0 <= call.k_start < call.k_stop <= k.num_rows:
                return f"call {_name(call)} lies outside its rows ({q.num_rows} x {k.num_rows})"
            wrong = self._check_one(q, k, call)
            if wrong:
                return f"call {_name(call)} {wrong}"
            total += self._pairs(q, k, call, visible)
        for call, other in combinations(calls, 2):
            if _overlap(call, other):
                return f"calls {_name(call)} and {_name(other)} compute the same pairs"
        if total != visible:
            return f"calls compute {total} pairs of the task's {visible} visible ones"
        return None

    def _check_one(self, q: RowMap, k: RowMap, call: Call) -> str | None:
        if call.kind is CallKind.RANGE:
            return None
        first_q, last_q = q.extremes(call.q_start, call.q_stop)
        first_k, last_k = k.extremes(call.k_start, call.k_stop)
        if last_q >= self._rows.q_tokens:
            return "contains padding rows"
        if not self._rows.ordered:
            return self._check_union(q, k, call)
        lo, hi = self._rows.bounds(np.array([first_q, last_q], dtype=np.int64))
        if lo[1] > first_k:
            return "contains pairs that the mask hides"
        if call.kind is CallKind.FULL:
            return None if hi[0] > last_k else "contains pairs that the mask hides"
        size = call.q_stop - call.q_start
        if call.k_stop - call.k_start != size:
            return "is not square"
        on_edge = hi[0] == first_k + 1 and hi[1] == first_k + size
        straight = self._rows.segment_at(first_q) is self._rows.segment_at(last_q)
        in_order = q.consecutive(call.q_start, call.q_stop) and k.consecutive(
            call.k_start, call.k_stop
        )
        return None if on_edge and straight and in_order else "does not lie on the mask's edge"

    def _check_union(self, q: RowMap, k: RowMap, call: Call) -> str | None:
        """Where bounds may fall, two ends say nothing of what is between: pairs are counted."""
        (first_q, last_q), (first_k, _) = (
            q.extremes(call.q_start, call.q_stop),
            k.extremes(call.k_start, call.k_stop),
        )
        height, width = call.q_stop - call.q_start, call.k_stop - call.k_start
        seen = self._seen(q, k, call)
        if call.kind is CallKind.FULL:
            return None if seen == height * width else "contains pairs that the mask hides"
        if height != width:
            return "is not square"
        # The triangle of one interval, and no pair of any other.
        segment = self._rows.segment_at(first_q)
        in_order = q.consecutive(call.q_start, call.q_stop) and k.consecutive(
            call.k_start, call.k_stop
        )
        on_edge = any(
            interval.at(first_q)[1] == first_k + 1
            and interval.at(last_q)[1] == first_k + height
            and interval.at(last_q)[0] <= first_k
            for interval in segment.intervals
        )
        exact = last_q < segment.stop and seen == height * (height + 1) // 2
        return None if on_edge and exact and in_order else "does not lie on the mask's edge"

    def _pairs(self, q: RowMap, k: RowMap, call: Call, visible: int) -> int:
        height, width = call.q_stop - call.q_start, call.k_stop - call.k_start
        if call.kind is CallKind.FULL:
            return height * width
        if call.kind is CallKind.CAUSAL:
            return height * (height + 1) // 2
        if height == q.num_rows and width == k.num_rows:
            return visible
        return self._seen(q, k, call)

    def _seen(self, q: RowMap, k: RowMap, call: Call) -> int:
        q_runs = q.runs(call.q_start, call.q_stop)
        k_runs = k.runs(call.k_start, call.k_stop)
        return num_visible(q_runs, k_runs, self._rows)


def _overlap(call: Call, other: Call) -> bool:
    return (
        call.q_start < other.q_stop
        and other.q_start < call.q_stop
        and call.k_start < other.k_stop
        and other.k_start < call.k_stop
    )


def _name(call: Call) -> str:
    return f"{call.kind}({call.q_start}:{call.q_stop},{call.k_start}:{call.k_stop})"
