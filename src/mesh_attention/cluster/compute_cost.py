"""Seconds of the compute operations: kernel calls on the cluster's curves, and passes over memory.

A call lasts as long as its pairs at the rate its rows and columns allow, but no less than the host
needs to launch it. Merging a partial result and adding gradients are passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.cluster.cluster import REFERENCE_HEADS, Cluster
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.draw.work import CallPairs
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    Attend,
    AttendBackward,
    Attention,
    Call,
    Free,
    Merge,
    Operation,
)
from mesh_attention.plan.split_calls import split_calls


class ComputeCosts:
    def __init__(self, cluster: Cluster, plan: Plan, direction: Direction) -> None:
        self._cluster = cluster
        self._problem = plan.problem
        self._direction = direction
        self._pairs = CallPairs(plan)
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

    def _calls(self, op: Attention, table: Mapping[str, Buffer]) -> tuple[float, ...]:
        heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
        seconds = []
        for call in op.calls:
            rows, columns = call.q_stop - call.q_start, call.k_stop - call.k_start
            pairs = self._pairs(op, table, call)
            key = (call.kind, rows, columns, heads, kv_heads, pairs)
            known = self._known.get(key)
            if known is None:
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
