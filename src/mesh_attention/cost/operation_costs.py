"""Seconds of a plan's operations when nothing disturbs them, as the simulator asks for them.

Ranks whose buffers differ in nothing but the places of their rows are alike: an operation that they
have in common costs the same on all of them, and is looked at once. Only row ranges depend on
places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mesh_attention.cost.compute_cost import ComputeCosts
from mesh_attention.cost.timed_call import TimedCall
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Buffer, Piece
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attention, CallKind, Collective, Free, Operation
from mesh_attention.plan.language.traffic import Flows, TrafficMeter
from mesh_attention.plan.language.workspace import Alike
from mesh_attention.plan.passes.seconds import CallSeconds, TransferCosts
from mesh_attention.plan.problem.problem import Problem


class OperationCosts(Protocol):
    """Seconds of operations when nothing disturbs them. Tests put their own here."""

    def compute(self, op: Operation, table: Mapping[str, Buffer]) -> tuple[TimedCall, ...]:
        """Its kernel calls in turn."""
        ...

    def collective(self, op: Collective, flows: Flows, member: int) -> float: ...

    def flow(self, source: int, target: int, num_bytes: int) -> float: ...


class ClusterCosts:
    """What the descriptions of the cluster and of its kernels say of a compiled plan."""

    def __init__(self, cluster: Cluster, plan: Plan, one: Pass, clock: CallSeconds) -> None:
        self.compute = ComputeCosts(plan, one.direction, clock).calls
        transfers = TransferCosts(cluster.links, plan, one)
        self.collective, self.flow = transfers.collective, transfers.flow


class RememberedCosts:
    """Kernel calls and flows of each rank's operations, worked out once for alike ranks."""

    def __init__(
        self,
        problem: Problem,
        one: Pass,
        costs: OperationCosts,
        ranks: Sequence[int],
        alike: Alike,
    ) -> None:
        self._costs = costs
        programs = {rank: one.programs[rank] for rank in ranks}
        numbers = {rank: alike.table(program) for rank, program in programs.items()}
        self._tables = {rank: program.buffer_table() for rank, program in programs.items()}
        calls: dict[int, dict[Operation, tuple[TimedCall, ...]]] = {}
        flows: dict[int, dict[Operation, Flows]] = {}
        sizes: dict[int, dict[tuple[Piece, ...], int]] = {}
        self._calls = {rank: calls.setdefault(number, {}) for rank, number in numbers.items()}
        self._flows = {rank: flows.setdefault(number, {}) for rank, number in numbers.items()}
        self._sizes = {rank: sizes.setdefault(number, {}) for rank, number in numbers.items()}
        self._problem = problem

    def calls(self, rank: int, op: Operation) -> tuple[TimedCall, ...]:
        """In turn; nothing where there is nothing to do."""
        if isinstance(op, Free):
            return ()
        known = self._calls[rank].get(op)
        if known is None:
            calls = self._costs.compute(op, self._tables[rank])
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
