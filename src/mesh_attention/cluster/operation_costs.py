"""Seconds of a plan's operations when nothing disturbs them, as the simulator asks for them.

Ranks whose buffers differ in nothing but the places of their rows are alike: an operation that they
have in common costs the same on all of them, and is looked at once. Only row ranges depend on
places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.communication_cost import CommunicationCosts
from mesh_attention.cluster.compute_cost import ComputeCosts
from mesh_attention.cluster.timed_call import TimedCall
from mesh_attention.plan.buffers import Buffer, Piece
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import Attention, CallKind, Collective, Free, Operation
from mesh_attention.plan.split_calls import splits_wanted
from mesh_attention.plan.traffic import Flows, TrafficMeter


class OperationCosts(Protocol):
    """Seconds of operations when nothing disturbs them. Tests put their own here."""

    def compute(
        self, op: Operation, table: Mapping[str, Buffer], splits: int
    ) -> tuple[TimedCall, ...]:
        """Its kernel calls in turn, with long ones split into so many where that helps."""
        ...

    def collective(self, op: Collective, flows: Flows, member: int) -> float: ...

    def flow(self, source: int, target: int, num_bytes: int) -> float: ...


class ClusterCosts:
    """What the cluster's description says."""

    def __init__(self, cluster: Cluster, plan: Plan, one: Pass, kernel: str | None = None) -> None:
        self.compute = ComputeCosts(cluster, plan, one.direction, kernel).calls
        communication = CommunicationCosts(cluster, plan, one)
        self.collective, self.flow = communication.collective, communication.flow


def alike_ranks(one: Pass, ranks: Iterable[int]) -> dict[int, int]:
    """A number for each of these ranks, equal for ranks that are alike."""
    by_buffer: dict[Buffer, int] = {}
    shapes: dict[tuple[object, ...], int] = {}
    known: dict[tuple[int, ...], int] = {}
    numbers = {}
    for rank in ranks:
        program, table = one.programs[rank], []
        for b in program.buffers:
            shape = by_buffer.get(b)
            if shape is None:
                key = (b.name, b.kind, b.precision, b.role, b.num_heads, b.num_rows)
                shape = by_buffer[b] = shapes.setdefault(key, len(shapes))
            table.append(shape)
        numbers[rank] = known.setdefault(tuple(table), len(known))
    return numbers


class RememberedCosts:
    """Kernel calls and flows of each rank's operations, worked out once for alike ranks."""

    def __init__(
        self, problem: Problem, one: Pass, costs: OperationCosts, alike: Mapping[int, int]
    ) -> None:
        self._costs = costs
        programs = {rank: one.programs[rank] for rank in alike}
        self._tables = {rank: program.buffer_table() for rank, program in programs.items()}
        forward = one.direction is Direction.FORWARD  # backward calls are never split
        self._splits = {r: splits_wanted(p) if forward else 1 for r, p in programs.items()}
        calls: dict[tuple[int, int], dict[Operation, tuple[TimedCall, ...]]] = {}
        flows: dict[int, dict[Operation, Flows]] = {}
        sizes: dict[int, dict[tuple[Piece, ...], int]] = {}
        self._calls = {r: calls.setdefault((n, self._splits[r]), {}) for r, n in alike.items()}
        self._flows = {rank: flows.setdefault(number, {}) for rank, number in alike.items()}
        self._sizes = {rank: sizes.setdefault(number, {}) for rank, number in alike.items()}
        self._problem = problem

    def calls(self, rank: int, op: Operation) -> tuple[TimedCall, ...]:
        """In turn; nothing where there is nothing to do."""
        if isinstance(op, Free):
            return ()
        known = self._calls[rank].get(op)
        if known is None:
            calls = self._costs.compute(op, self._tables[rank], self._splits[rank])
            known = tuple(call for call in calls if call.seconds)
            by_place = isinstance(op, Attention) and any(
                call.kind is CallKind.RANGE for call in op.calls
            )
            if not by_place:
                self._calls[rank][op] = known
        return known

    def num_bytes(self, rank: int, pieces: tuple[Piece, ...]) -> int:
        known = self._sizes[rank].get(pieces)
        if known is None:
            table = self._tables[rank]
            known = sum(piece.num_bytes(table[piece.buffer], self._problem) for piece in pieces)
            self._sizes[rank][pieces] = known
        return known

    def flows(self, rank: int, op: Collective) -> Flows:
        known = self._flows[rank].get(op)
        if known is None:
            known = TrafficMeter(self._problem, self._tables[rank]).flows(op)
            self._flows[rank][op] = known
        return known
