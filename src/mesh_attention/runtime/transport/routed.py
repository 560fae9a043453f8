"""The way of each operation: through shared memory where all its ranks can, else over the network.

A ring that leaves the node is cut at the node's edge: each of its links takes the way it can.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import Communication, SendRecv
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Handle, Start, View
from mesh_attention.runtime.transport.shared_memory import SharedMemory
from mesh_attention.runtime.transport.sizes import Counted
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
        self._ranks = groups.global_ranks(plan, one, rank)

    @property
    def in_order(self) -> bool:
        return self._far.in_order  # and the near ones share its stream

    @property
    def own_stream(self) -> bool:
        return self._far.own_stream

    def prepare(self, op: Communication, view: View) -> Start:
        members, meter = self._members[op.group], self._far.meter
        traffic = meter.measure(op, members.index(self._rank), len(members), view)
        return Counted(self._way(op, view), meter, op, traffic)

    def _way(self, op: Communication, view: View) -> Start:
        ranks = self._ranks[op.group]
        if self._memory.covers(ranks):
            return partial(self._near.begin, op, view)
        if isinstance(op, SendRecv) and self._memory.block is not None:
            return self._by_link(op, ranks, view)
        return self._far.ready(op, view)

    def _by_link(self, op: SendRecv, ranks: list[int], view: View) -> Start:
        to_near = self._memory.covers([ranks[op.to_member]])
        from_near = self._memory.covers([ranks[op.from_member]])
        if to_near == from_near:
            return partial(self._near.begin, op, view) if to_near else self._far.ready(op, view)
        sending, receiving = replace(op, receives=()), replace(op, sends=())
        near, far = (sending, receiving) if to_near else (receiving, sending)
        far_start = self._far.ready(far, view)
        # The far half first: it needs no signal, so ranks at the edge keep nobody waiting.
        return lambda after: _Both(far_start(after), self._near.begin(near, view, after))


class _Both:
    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def ready(self) -> bool:
        return all(handle.ready() for handle in self._handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
