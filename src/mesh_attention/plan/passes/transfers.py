"""Seconds of the communication operations of a pass when nothing disturbs them."""

from __future__ import annotations

from functools import cache

from mesh_attention.machine.cluster import Links
from mesh_attention.machine.transfer_time import (
    GroupShape,
    all_to_all_seconds,
    flow_seconds,
    ring_seconds,
)
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import AllToAll, Collective
from mesh_attention.plan.language.traffic import Flows


class TransferCosts:
    def __init__(self, links: Links, plan: Plan, one: Pass) -> None:
        self._links = links
        self._devices, self._groups = plan.devices, one.groups
        self.shape = cache(self._shape)

    def _shape(self, group: str) -> GroupShape:
        return GroupShape.of(
            self._links, tuple([self._devices[rank] for rank in self._groups[group]])
        )

    def collective(self, op: Collective, flows: Flows, member: int) -> float:
        """As this member sees it; the group is done when the slowest member is."""
        shape = self.shape(op.group)
        if isinstance(op, AllToAll):
            received = {other: num_bytes for other, (num_bytes, _) in flows.received.items()}
            return all_to_all_seconds(self._links, shape, flows.sent, received, member)
        return ring_seconds(self._links, shape, flows.received[0][0])

    def flow(self, source: int, target: int, num_bytes: int) -> float:
        return flow_seconds(self._links, source, target, num_bytes)
