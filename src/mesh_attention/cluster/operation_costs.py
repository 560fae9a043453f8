"""Seconds of a plan's operations on a cluster when nothing disturbs them, as the simulator asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.communication_cost import CommunicationCosts
from mesh_attention.cluster.compute_cost import ComputeCosts
from mesh_attention.plan.buffers import Buffer
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import AllGather, AllToAll, Operation, ReduceScatter
from mesh_attention.plan.traffic import Flows

__all__ = ["ClusterCosts", "Collective", "OperationCosts"]

Collective = AllGather | ReduceScatter | AllToAll


class OperationCosts(Protocol):
    """Seconds of operations when nothing disturbs them. Tests put their own here."""

    def compute(self, op: Operation, table: Mapping[str, Buffer], pieces: int) -> tuple[float, ...]:
        """Of its kernel calls in turn, with long ones cut into so many pieces."""
        ...

    def collective(self, op: Collective, flows: Flows, member: int) -> float: ...

    def flow(self, source: int, target: int, num_bytes: int) -> float: ...


class ClusterCosts:
    """What the cluster's description says."""

    def __init__(self, cluster: Cluster, plan: Plan, one: Pass) -> None:
        self._compute = ComputeCosts(cluster, plan, one.direction)
        self._communication = CommunicationCosts(cluster, plan, one)

    def compute(self, op: Operation, table: Mapping[str, Buffer], pieces: int) -> tuple[float, ...]:
        return self._compute.seconds(op, table, pieces)

    def collective(self, op: Collective, flows: Flows, member: int) -> float:
        return self._communication.collective(op, flows, member)

    def flow(self, source: int, target: int, num_bytes: int) -> float:
        return self._communication.flow(source, target, num_bytes)
