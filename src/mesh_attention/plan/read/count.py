"""Bytes each rank moves and holds, counted from the programs and from nothing else.

Received bytes are what `bytes_per_rank` reports: over all ranks they equal the sent ones. A *unit*
is one Q partition; `units_total` leaves statistics (LSE, delta) out, as the paper's formulas do,
while every number in bytes includes them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mesh_attention.plan.language.plan import Direction, Pass, Plan, a_plan
from mesh_attention.plan.language.program import Attention, Communication, Program
from mesh_attention.plan.language.traffic import Traffic, TrafficMeter, entering_bytes, traffic_of
from mesh_attention.plan.language.workspace import peak_buffer_bytes
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class RankCount:
    """`by_operation` maps AllGather, ReduceScatter, AllToAll and SendRecv to their traffic, and
    `times` to how many there are."""

    rank: int
    total: Traffic
    by_operation: dict[str, Traffic]
    entering_node_bytes: int
    entering_node_token_bytes: int
    peak_buffer_bytes: int
    times: dict[str, int]
    num_kernel_calls: int

    @property
    def num_communications(self) -> int:
        return sum(self.times.values())


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
        return {
            "bytes_per_rank": _mean_and_max(received),
            "inter_node_bytes_per_rank": _mean_and_max(
                [entering / self.ranks_per_node for entering in self.nodes]
            ),
            "peak_buffer_bytes": self.peak_buffer_bytes,
            "units_total": float(self.units_total),
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
    """A mean is a float, also where it is whole: readers of JSON know the type of a field."""
    return {"mean": sum(values) / len(values), "max": max(values)}


def count(plan: Plan) -> dict[Direction, PassCount]:
    return {one.direction: count_pass(plan, one) for one in a_plan(plan).passes}


def count_pass(plan: Plan, one: Pass) -> PassCount:
    group_nodes = {
        name: tuple(plan.node_of(rank) for rank in ranks) for name, ranks in one.groups.items()
    }
    ranks = tuple(_count_rank(p, plan.problem, group_nodes, one.members) for p in one.programs)
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
    problem: Problem,
    group_nodes: dict[str, tuple[int, ...]],
    member_of: dict[str, dict[int, int]],
) -> RankCount:
    meter = TrafficMeter(problem, program.buffer_table())
    moved: dict[str, list[Traffic]] = defaultdict(list)
    entering = entering_tokens = calls = 0
    for op in program.operations:
        if isinstance(op, Communication):
            member, nodes = member_of[op.group][program.rank], group_nodes[op.group]
            flows = meter.flows(op)
            moved[type(op).__name__].append(traffic_of(op, flows, member, len(nodes)))
            crossing = entering_bytes(op, flows, member, nodes)
            entering += crossing[0]
            entering_tokens += crossing[1]
        elif isinstance(op, Attention):
            calls += len(op.calls)
    by_operation = {kind: Traffic.sum(each) for kind, each in moved.items()}
    return RankCount(
        program.rank,
        Traffic.sum(by_operation.values()),
        by_operation,
        entering,
        entering_tokens,
        peak_buffer_bytes(program, problem),
        {kind: len(each) for kind, each in moved.items()},
        calls,
    )
