"""Bytes each rank moves and holds, counted from the programs and from nothing else.

Received bytes are what `bytes_per_rank` reports: over all ranks they equal the sent ones. A *unit*
is one Q partition; `units_total` leaves statistics (LSE, delta) out, as the paper's formulas do,
while every number in bytes includes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mesh_attention.plan.buffers import Role
from mesh_attention.plan.names import NamesOf, written
from mesh_attention.plan.plan import Direction, Pass, Plan, a_plan
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Free,
    Program,
    ReduceScatter,
    SendRecv,
)
from mesh_attention.plan.sizes import BufferSizes
from mesh_attention.plan.traffic import Traffic, TrafficMeter, entering_bytes, traffic_of

__all__ = ["PassCount", "RankCount", "count", "count_pass", "peak_buffer_bytes"]


@dataclass(frozen=True, slots=True)
class RankCount:
    """`by_operation` maps AllGather, ReduceScatter, AllToAll and SendRecv to their traffic."""

    rank: int
    total: Traffic
    by_operation: dict[str, Traffic]
    entering_node_bytes: int
    entering_node_token_bytes: int
    peak_buffer_bytes: int
    num_communications: int
    num_kernel_calls: int


@dataclass(frozen=True, slots=True)
class PassCount:
    ranks: tuple[RankCount, ...]
    nodes: tuple[int, ...]  # bytes that enter each node
    node_tokens: tuple[int, ...]  # the same without statistics
    ranks_per_node: int
    unit_bytes: int

    @property
    def units_total(self) -> Fraction:
        return Fraction(sum(rank.total.token_bytes for rank in self.ranks), self.unit_bytes)

    def units_into_node(self, node: int) -> Fraction:
        return Fraction(self.node_tokens[node], self.unit_bytes)

    @property
    def peak_buffer_bytes(self) -> int:
        return max(rank.peak_buffer_bytes for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        received = [rank.total.received_bytes for rank in self.ranks]
        statistics = [r.total.received_bytes - r.total.token_bytes for r in self.ranks]
        kinds = sorted({kind for rank in self.ranks for kind in rank.by_operation})
        units = self.units_total
        return {
            "bytes_per_rank": _mean_and_max(received),
            "inter_node_bytes_per_rank": _mean_and_max(
                [entering / self.ranks_per_node for entering in self.nodes]
            ),
            "peak_buffer_bytes": self.peak_buffer_bytes,
            "units_total": int(units) if units.denominator == 1 else float(units),
            "statistics_bytes_per_rank": _mean_and_max(statistics),
            "bytes_per_rank_by_operation": {
                kind: _mean_and_max(
                    [rank.by_operation.get(kind, Traffic()).received_bytes for rank in self.ranks]
                )
                for kind in kinds
            },
            "communications_per_rank": _mean_and_max([r.num_communications for r in self.ranks]),
            "kernel_calls_per_rank": _mean_and_max([r.num_kernel_calls for r in self.ranks]),
        }


def _mean_and_max(values: list[Any]) -> dict[str, Any]:
    mean = sum(values) / len(values)
    return {"mean": int(mean) if mean == int(mean) else mean, "max": max(values)}


def count(plan: Plan) -> dict[Direction, PassCount]:
    return {one.direction: count_pass(plan, one) for one in a_plan(plan).passes}


def count_pass(plan: Plan, one: Pass) -> PassCount:
    group_nodes = {
        name: tuple(plan.node_of(rank) for rank in ranks) for name, ranks in one.groups.items()
    }
    member_of = {
        name: {rank: member for member, rank in enumerate(ranks)}
        for name, ranks in one.groups.items()
    }
    meter = TrafficMeter(plan.problem)
    peaks = _Peaks(meter.sizes)
    ranks = tuple(_count_rank(p, group_nodes, member_of, meter, peaks) for p in one.programs)
    entering, tokens = [0] * plan.num_nodes, [0] * plan.num_nodes
    for rank in ranks:
        node = plan.node_of(rank.rank)
        entering[node] += rank.entering_node_bytes
        tokens[node] += rank.entering_node_token_bytes
    problem = plan.problem
    unit = plan.q_layout.slots * problem.num_heads * problem.head_dim * problem.element_bytes
    per_node = plan.ranks_per_node or plan.num_ranks
    return PassCount(ranks, tuple(entering), tuple(tokens), min(per_node, plan.num_ranks), unit)


def _count_rank(
    program: Program,
    group_nodes: dict[str, tuple[int, ...]],
    member_of: dict[str, dict[int, int]],
    meter: TrafficMeter,
    peaks: _Peaks,
) -> RankCount:
    table = program.buffer_table()
    by_operation: dict[str, Traffic] = defaultdict(Traffic)
    entering = entering_tokens = communications = calls = 0
    for op in program.operations:
        if isinstance(op, AllGather | ReduceScatter | AllToAll | SendRecv):
            member, nodes = member_of[op.group][program.rank], group_nodes[op.group]
            flows = meter.flows(op, table)
            by_operation[type(op).__name__] += traffic_of(op, flows, member, len(nodes))
            crossing = entering_bytes(op, flows, member, nodes)
            entering += crossing[0]
            entering_tokens += crossing[1]
            communications += 1
        else:
            calls += len(getattr(op, "calls", ()))
    total = sum(by_operation.values(), Traffic())
    peak = peaks.of(program)
    return RankCount(
        program.rank,
        total,
        dict(by_operation),
        entering,
        entering_tokens,
        peak,
        communications,
        calls,
    )


def peak_buffer_bytes(plan: Plan, program: Program) -> int:
    """The most workspace bytes alive at once: from a buffer's first write to its free."""
    return _Peaks(BufferSizes(plan.problem)).of(program)


class _Peaks:
    """Programs that write and free the same names of the same sizes have one peak."""

    def __init__(self, sizes: BufferSizes) -> None:
        self._sizes = sizes
        self._written = NamesOf(written)
        self._known: dict[tuple[object, ...], int] = {}
        self._kept: list[Program] = []  # ids of frees stay unique while their programs live

    def of(self, program: Program) -> int:
        size = {
            b.name: self._sizes.num_bytes(b) for b in program.buffers if b.role is Role.WORKSPACE
        }
        steps = [op if isinstance(op, Free) else self._written(op) for op in program.operations]
        key = (tuple(map(id, steps)), tuple(size.items()))
        if key not in self._known:
            self._known[key] = self._find(steps, size)
            self._kept.append(program)
        return self._known[key]

    @staticmethod
    def _find(steps: list[Free | Sequence[str]], size: dict[str, int]) -> int:
        live: set[str] = set()
        held = peak = 0
        for step in steps:
            if isinstance(step, Free):
                for name in live.intersection(step.buffers):
                    held -= size[name]
                    live.discard(name)
                continue
            for name in step:
                if name in size and name not in live:
                    live.add(name)
                    held += size[name]
            peak = max(peak, held)
        return peak
