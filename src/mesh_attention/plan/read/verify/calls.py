"""Do the kernel calls of a task compute its visible pairs, all of them and each once?

`compute.py` asks this for every attention of a plan that is verified. A full rectangle must be
visible in all of it, a causal square must lie exactly on the mask's edge, and a row range computes
what the mask shows by definition. So if the calls are disjoint and their pairs add up to the
visible pairs of the task, they are the task.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

from mesh_attention.plan.language.program import Call, CallKind
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run, num_visible
from mesh_attention.plan.problem.spans import Spans, slice_spans


class RowMap:
    """Positions of the rows of a piece, as runs."""

    def __init__(self, layout: Layout, spans: Spans) -> None:
        self.num_rows = sum(stop - start for start, stop in spans)
        self._layout, self._spans = layout, spans
        self.runs = cache(self._runs)

    def _runs(self, start: int, stop: int) -> list[Run]:
        """The runs of the rows `start..stop`."""
        spans = slice_spans(self._spans, start, stop)
        return [run for span in spans for run in self._layout.runs(*span)]

    def extremes(self, start: int, stop: int) -> tuple[int, int]:
        """Smallest and largest position of these rows."""
        runs = self.runs(start, stop)
        return min(run.start for run in runs), max(run.stop for run in runs) - 1

    def consecutive(self, start: int, stop: int) -> bool:
        """Do the positions grow by one from row to row?"""
        blocks = [block for run in self.runs(start, stop) for block in run.blocks()]
        return all(before[1] == after[0] for before, after in pairwise(blocks))


def calls_fault(
    q: RowMap, k: RowMap, calls: tuple[Call, ...], visible: int, mask: RowRanges
) -> str | None:
    """What is wrong with these calls for a task with so many visible pairs; None if nothing."""
    total = 0
    for call in calls:
        name = call.by("")
        inside = 0 <= call.q_start < call.q_stop <= q.num_rows
        if not inside or not 0 <= call.k_start < call.k_stop <= k.num_rows:
            return f"call {name} lies outside its rows ({q.num_rows} x {k.num_rows})"
        pairs = call.num_pairs
        if pairs is None:
            whole = call.size == (q.num_rows, k.num_rows)
            pairs = visible if whole else _num_visible(q, k, call, mask)
        elif wrong := _rectangle_fault(q, k, call, mask):
            return f"call {name} {wrong}"
        total += pairs
    for call, other in combinations(calls, 2):
        if _overlap(call, other):
            return f"calls {call.by('')} and {other.by('')} compute the same pairs"
    if total != visible:
        return f"calls compute {total} pairs of the task's {visible} visible ones"
    return None


def _rectangle_fault(q: RowMap, k: RowMap, call: Call, mask: RowRanges) -> str | None:
    """What is wrong with a full rectangle or a causal square."""
    first_q, last_q = q.extremes(call.q_start, call.q_stop)
    first_k, _ = k.extremes(call.k_start, call.k_stop)
    height, width = call.size
    if last_q >= mask.q_tokens:
        return "contains padding rows"
    all_seen = _num_visible(q, k, call, mask) == call.num_pairs
    if call.kind is CallKind.FULL:
        return None if all_seen else "contains pairs that the mask hides"
    if height != width:
        return "is not square"
    # The triangle of one interval, and no pair of any other.
    segment = mask.segment_at(first_q)
    on_edge = last_q < segment.stop and any(
        interval.at(first_q)[1] == first_k + 1
        and interval.at(last_q)[1] == first_k + height
        and interval.at(last_q)[0] <= first_k
        for interval in segment.intervals
    )
    in_order = q.consecutive(call.q_start, call.q_stop) and k.consecutive(call.k_start, call.k_stop)
    return None if all_seen and on_edge and in_order else "does not lie on the mask's edge"


def _num_visible(q: RowMap, k: RowMap, call: Call, mask: RowRanges) -> int:
    """Visible pairs of the rows of a call."""
    q_runs, k_runs = q.runs(call.q_start, call.q_stop), k.runs(call.k_start, call.k_stop)
    return num_visible(q_runs, k_runs, mask)


def _overlap(call: Call, other: Call) -> bool:
    return (
        call.q_start < other.q_stop
        and other.q_start < call.q_stop
        and call.k_start < other.k_stop
        and other.k_start < call.k_stop
    )
