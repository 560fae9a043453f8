"""Seconds of the compute operations: kernel calls on the cluster's curves, and passes over memory.

A call lasts as long as its pairs at the rate its rows and columns allow, but no less than the host
needs to launch it. Merging a partial result and adding gradients are passes over memory.

Visible pairs of a row-range call are counted in closed form. Neighbouring partitions of a striped
layout are one strided run of wider blocks, so the rows that a Q group gathered are counted as one
run and not as many.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.cluster.cluster import REFERENCE_HEADS, Cluster
from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.layout import Layout, Spans, slice_spans
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Call,
    CallKind,
    Free,
    Merge,
    Operation,
)
from mesh_attention.plan.runs import Run, visible_pairs
from mesh_attention.plan.split_calls import split_calls


class ComputeCosts:
    def __init__(self, cluster: Cluster, plan: Plan, direction: Direction) -> None:
        self._cluster = cluster
        self._problem = plan.problem
        self._direction = direction
        self._pairs = RangePairs(plan)
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, op: Operation, table: Mapping[str, Buffer], splits: int) -> tuple[float, ...]:
        """Of the kernel calls in turn, those of the forward pass split (`plan/split_calls.py`)."""
        match op:
            case Attend():
                whole = self._calls(op, table)
                heads = op.q.num_heads(table[op.q.buffer])
                cut = split_calls(op, heads, splits)
                return tuple(s for pair in zip(whole, cut, strict=True) for s in _divided(*pair))
            case AttendBackward():
                return self._calls(op, table)
            case Merge():
                touched = (*op.inputs, *op.outputs)
                moved = sum(p.num_bytes(table[p.buffer], self._problem) for p in touched)
                return (self._gap + self._memory(moved),)
            case Free():
                return ()
        raise AssertionError(op)  # communication has costs of its own

    @property
    def _gap(self) -> float:
        return self._cluster.compute.gap_microseconds * 1e-6

    def _memory(self, num_bytes: float) -> float:
        return num_bytes / (self._cluster.gpu.memory_gb_per_second * 1e9)

    def _calls(self, op: Attend | AttendBackward, table: Mapping[str, Buffer]) -> tuple[float, ...]:
        q, k = table[op.q.buffer], table[op.k.buffer]
        heads = op.q.num_heads(q)
        kv_heads = op.k.num_heads(k)
        seconds = []
        for call in op.calls:
            if call.kind is CallKind.RANGE:
                pairs = self._pairs(op.q, q, op.k, k, call)
                seconds.append(self._call(call, heads, kv_heads, pairs))
                continue
            rows, columns = call.q_stop - call.q_start, call.k_stop - call.k_start
            key = (call.kind, rows, columns, heads, kv_heads)
            known = self._known.get(key)
            if known is None:
                full = call.kind is CallKind.FULL
                pairs = rows * columns if full else rows * (rows + 1) // 2
                known = self._known[key] = self._call(call, heads, kv_heads, pairs)
            seconds.append(known)
        return tuple(seconds)

    def _call(self, call: Call, heads: int, kv_heads: int, pairs: int) -> float:
        rows, columns = call.q_stop - call.q_start, call.k_stop - call.k_start
        rate = self._cluster.compute.rate(self._direction, call.kind)
        backward = self._direction is Direction.BACKWARD
        filled = rows * heads / REFERENCE_HEADS
        slower = 1.0 + rate.half_rows / filled + rate.half_columns / columns
        share = heads / self._problem.num_heads
        flops = self._problem.flops(pairs, backward=backward) * share
        kernel = self._gap + flops * slower / (rate.tflops * 1e12)
        launch = self._cluster.compute.launch_microseconds * 1e-6
        merged = _merged_bytes(self._problem, rows, columns, heads, kv_heads, backward)
        return max(kernel, launch) + self._gap + self._memory(merged)


def _divided(seconds: float, split: list[Call]) -> list[float]:
    """By rows. Splits are free: a call begins while the last programs of the one before end."""
    rows = [call.q_stop - call.q_start for call in split]
    return [seconds * r / sum(rows) for r in rows]


def _merged_bytes(
    problem: Problem, rows: int, columns: int, heads: int, kv_heads: int, backward: bool
) -> int:
    """A partial result is read, and its accumulator read and written."""
    once = problem.element_bytes + 2 * problem.accumulate_bytes
    if not backward:
        return rows * heads * problem.v_dim * once
    q_side = rows * heads * problem.head_dim
    kv_side = columns * kv_heads * (problem.head_dim + problem.v_dim)
    return (q_side + kv_side) * once


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
