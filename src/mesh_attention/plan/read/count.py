"""Counts the bytes that each rank moves, holds and keeps, and the least that must move.

The command line, the reports, step planning and the tests read these numbers, and a session asks
for `recalled`. Nothing here changes a plan.

`bytes_per_rank` counts received bytes: over all ranks they equal the sent bytes. A *unit* is one Q
partition. `units_total` leaves statistics (LSE, delta) out, as the paper's formulas do; numbers in
bytes include them.

`least_bytes`: a rank's work is a set of (query, key, head) triples. For one KV head, a rank that
touches A rows of queries (over all query heads of that KV head) and b rows of keys covers at most
A b triples. Rows that it does not hold must reach it, and results of query rows that it does not
hold must leave it. Work on a rank's own rows is free. `docs/theory.md` has the proof and a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import sqrt
from typing import Any

from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan, a_plan
from mesh_attention.plan.language.program import (
    Attention,
    Communication,
    Program,
)
from mesh_attention.plan.language.traffic import Traffic, TrafficMeter, entering_bytes, traffic_of
from mesh_attention.plan.language.workspace import peak_buffer_bytes
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.problem.runs import Run, num_visible


@dataclass(frozen=True, slots=True)
class RankCount:
    """`by_operation` has the traffic of AllGather, ReduceScatter, AllToAll and SendRecv; `times`
    has the number of each."""

    rank: int
    total: Traffic
    by_operation: dict[str, Traffic]
    entering_node_bytes: int
    entering_node_token_bytes: int
    peak_buffer_bytes: int
    times: dict[str, int]
    num_kernel_calls: int


@dataclass(frozen=True, slots=True)
class PassCount:
    """What all ranks of a pass move and hold; `unit_bytes` are those of one Q partition."""

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
            "communications_per_rank": _mean_and_max([sum(r.times.values()) for r in self.ranks]),
            "kernel_calls_per_rank": _mean_and_max([r.num_kernel_calls for r in self.ranks]),
        }


def _mean_and_max(values: list[Any]) -> dict[str, Any]:
    """A mean is always a float, so that readers of JSON know the type of the field."""
    return {"mean": sum(values) / len(values), "max": max(values)}


def count(plan: Plan) -> dict[Direction, PassCount]:
    """For each pass: the bytes that enter each rank and each node, and that each rank holds."""
    return {pass_.direction: count_pass(plan, pass_) for pass_ in a_plan(plan).passes}


def count_pass(plan: Plan, pass_: Pass) -> PassCount:
    group_nodes = {
        name: tuple(plan.node_of(rank) for rank in ranks) for name, ranks in pass_.groups.items()
    }
    ranks = tuple(_count_rank(p, plan.problem, group_nodes, pass_.members) for p in pass_.programs)
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
    by_operation = {kind: sum(each, Traffic()) for kind, each in moved.items()}
    return RankCount(
        program.rank,
        sum(by_operation.values(), Traffic()),
        by_operation,
        entering,
        entering_tokens,
        peak_buffer_bytes(program, problem),
        {kind: len(each) for kind, each in moved.items()},
        calls,
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """Queries or keys of one KV head: elements that travel for a row, rows of all ranks, and rows
    that one rank holds."""

    row_elements: int
    all_rows: float
    own_rows: float


def least_bytes(
    problem: Problem, num_ranks: int, direction: Direction, *, keeps: bool = True
) -> float:
    """The least bytes that a rank receives: the mean over ranks with equal shares of the tokens and
    of the work, without statistics (LSE, delta). `keeps`: a backward pass may find all rows of q, k
    and v that the forward pass received; otherwise it finds only shards."""
    queries, keys = _sides(problem, num_ranks, once=keeps or direction is Direction.FORWARD)
    size = problem.element_bytes
    own_work = queries.own_rows * keys.own_rows  # of one KV head
    pairs = num_visible([Run(0, problem.q_tokens)], [Run(0, problem.keys)], problem.rows)
    all_work = float(pairs * problem.heads_per_kv_head)  # of one KV head
    share = all_work * problem.kv_heads / num_ranks
    beyond_own = share - problem.kv_heads * own_work
    if beyond_own <= 0:
        return 0.0
    if queries.row_elements * queries.own_rows > keys.row_elements * keys.all_rows:
        # Few ranks, and many query heads on a KV head: no query moves before all keys have. The
        # price is then convex in the work, and an equal share of every KV head is cheapest.
        return problem.kv_heads * _price(queries, keys, share / problem.kv_heads) * size
    # Otherwise the price is concave: the whole work of few KV heads is cheapest.
    heads = beyond_own / (all_work - own_work)
    if heads >= 1:
        return heads * _price(queries, keys, all_work) * size
    return _price(queries, keys, own_work + beyond_own) * size


def unit_bytes(problem: Problem, num_ranks: int) -> float:
    """Bytes of one Q partition."""
    tokens = problem.q_tokens / num_ranks
    return tokens * problem.num_heads * problem.head_dim * problem.element_bytes


def _sides(problem: Problem, num_ranks: int, *, once: bool) -> tuple[_Side, _Side]:
    qk, v, group = problem.head_dim, problem.v_dim, problem.heads_per_kv_head
    # Forward: Q, K and V come, and O leaves. Backward: dO comes, and dQ, dK and dV leave; Q, K and
    # V come again unless they were kept.
    of_query, of_key = (qk + v, qk + v) if once else (2 * qk + v, 2 * (qk + v))
    q_rows, k_rows = group * problem.q_tokens, problem.keys
    return _Side(of_query, q_rows, q_rows / num_ranks), _Side(of_key, k_rows, k_rows / num_ranks)


def _price(queries: _Side, keys: _Side, work: float) -> float:
    """Elements that must move for this work of one KV head: the cheapest A b = work."""
    q, k = queries.row_elements, keys.row_elements
    fewest_keys = max(keys.own_rows, work / queries.all_rows)
    most_keys = min(keys.all_rows, work / queries.own_rows)
    key_rows = min(max(sqrt(work * q / k), fewest_keys), most_keys)
    return q * (work / key_rows - queries.own_rows) + k * (key_rows - keys.own_rows)


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Bytes that the rank that holds most holds between the passes, and bytes that this saves.

    kept_bytes    rows of other ranks, or in other layouts, that the forward pass leaves
    held_bytes    `kept_bytes`, and the caller's tensors that the backward pass takes again
    shard_bytes   the caller's tensors alone: `held_bytes` where nothing is kept
    saved_bytes   rows of q, k and v that a rank receives forward but not backward, on average
    """

    kept_bytes: int
    held_bytes: int
    shard_bytes: int
    saved_bytes: float

    @property
    def extra_bytes(self) -> int:
        """Memory that keeping costs."""
        return self.held_bytes - self.shard_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"extra_bytes": self.extra_bytes}


def kept_bytes(plan: Plan, layers: int = 1) -> KeptBytes:
    """Of a plan with both passes, for a batch of one. So many layers hold rows at once;
    `saved_bytes` is that of one layer."""
    problem, ranks = plan.problem, range(plan.num_ranks)
    forward, backward = (plan.direction(direction) for direction in Direction)
    kept, held, shards = max(
        (_held(forward.programs[rank], backward.programs[rank], problem) for rank in ranks),
        key=lambda sizes: sizes[1],
    )
    fetched = [
        sum(_fetched(pass_, rank, problem) for rank in ranks) for pass_ in (forward, backward)
    ]
    saved = (fetched[0] - fetched[1]) / plan.num_ranks if kept else 0.0
    return KeptBytes(layers * kept, layers * held, layers * shards, saved)


def recalled(program: Program) -> tuple[Buffer, ...]:
    """The buffers that a backward program takes from the forward program of its rank."""
    return tuple(buffer for buffer in program.buffers if buffer.role is Role.RECALLED)


def _held(forward: Program, backward: Program, problem: Problem) -> tuple[int, int, int]:
    """Kept, held and shard bytes of a rank, as in `KeptBytes`."""
    kept = _bytes_of(recalled(backward), problem)
    inputs = [b for b in backward.buffers if b.role is Role.INPUT and b.kind is not Kind.GRAD_OUT]
    callers = [b for b in forward.buffers if b.role in (Role.INPUT, Role.OUTPUT)]
    return kept, kept + _bytes_of(inputs, problem), _bytes_of(callers, problem)


def _bytes_of(buffers: Iterable[Buffer], problem: Problem) -> int:
    return sum(buffer.num_bytes(problem) for buffer in buffers)


def _fetched(pass_: Pass, rank: int, problem: Problem) -> int:
    """Bytes of q, k and v that a rank receives."""
    program = pass_.programs[rank]
    meter = TrafficMeter(problem, program.buffer_table(), (Kind.Q, Kind.K, Kind.V))
    return sum(
        meter.traffic(op, pass_.members[op.group][rank], len(pass_.groups[op.group])).received_bytes
        for op in program.operations
        if isinstance(op, Communication)
    )
