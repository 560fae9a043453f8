"""Seconds of the compute operations: kernel calls on the cluster's curves, and passes over memory.

A call lasts as long as its pairs at the rate its rows and columns allow, but no less than the host
needs to launch it. Merging a partial result and adding gradients are passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.cluster.cluster import REFERENCE_HEADS, Cluster
from mesh_attention.cluster.range_pairs import RangePairs
from mesh_attention.plan.buffers import Buffer
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
from mesh_attention.plan.split_calls import split_calls

__all__ = ["ComputeCosts"]


class ComputeCosts:
    def __init__(self, cluster: Cluster, plan: Plan, direction: Direction) -> None:
        self._cluster = cluster
        self._problem = plan.problem
        self._direction = direction
        self._pairs = RangePairs(plan)
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, op: Operation, table: Mapping[str, Buffer], pieces: int) -> tuple[float, ...]:
        """Of the kernel calls in turn, those of the forward pass in pieces (`plan/pieces.py`)."""
        match op:
            case Attend():
                whole = self._calls(op, table)
                heads = op.q.num_heads(table[op.q.buffer])
                cut = split_calls(op, heads, pieces)
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


def _divided(seconds: float, pieces: list[Call]) -> list[float]:
    """By rows. Cuts are free: each piece begins while the last programs of the one before end."""
    rows = [piece.q_stop - piece.q_start for piece in pieces]
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
