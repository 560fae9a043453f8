"""The way of each operation: through shared memory where all its ranks can, else over the network.

A ring that leaves the node is cut at the node's edge: each of its links takes the way it can.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import Communication, SendRecv
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, View
from mesh_attention.runtime.transport.shared import SharedMemory
from mesh_attention.runtime.transport.symmetric import SymmetricTransport

__all__ = ["RoutedTransport"]


class RoutedTransport:
    def __init__(
        self,
        plan: Plan,
        one: Pass,
        rank: int,
        groups: Groups,
        memory: SharedMemory,
        near: SymmetricTransport,
        far: DistributedTransport,
    ) -> None:
        self._rank = rank
        self._members = one.groups
        self._memory = memory
        self._near = near
        self._far = far
        self._ranks = {
            name: [groups.global_rank(plan, member) for member in members]
            for name, members in one.groups.items()
            if rank in members
        }

    def start(self, op: Communication, view: View, after: object) -> Handle:
        members = self._members[op.group]
        self._far.meter.count(op, members.index(self._rank), len(members), view)
        ranks = self._ranks[op.group]
        if self._memory.covers(ranks):
            return self._near.begin(op, view, after)
        if isinstance(op, SendRecv) and self._memory.block is not None:
            return self._by_link(op, ranks, view, after)
        return self._far.begin(op, view, after)

    def _by_link(self, op: SendRecv, ranks: list[int], view: View, after: object) -> Handle:
        to_near = self._memory.covers([ranks[op.to_member]])
        from_near = self._memory.covers([ranks[op.from_member]])
        if to_near == from_near:
            way = self._near if to_near else self._far
            return way.begin(op, view, after)
        sending, receiving = replace(op, receives=()), replace(op, sends=())
        near, far = (sending, receiving) if to_near else (receiving, sending)
        # The far half first: it needs no signal, so ranks at the edge keep nobody waiting.
        return _Both(self._far.begin(far, view, after), self._near.begin(near, view, after))


class _Both:
    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def ready(self) -> bool:
        return all(handle.ready() for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
