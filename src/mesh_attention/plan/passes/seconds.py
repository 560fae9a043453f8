"""Seconds of the kernel calls and of the transfers of a pass, when nothing disturbs them.

The passes choose by these times, and `cost/` adds them up. Both classes remember
what they computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from mesh_attention.machine.call_time import CallSize, HeadSizes, kernel_seconds, memory_seconds
from mesh_attention.machine.cluster import Links
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.machine.target import Target
from mesh_attention.machine.transfer_time import (
    GroupShape,
    all_to_all_seconds,
    flow_seconds,
    ring_seconds,
)
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.computed_pairs import CallPairs
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    AllToAll,
    Attend,
    Attention,
    Call,
    CallKind,
    Collective,
)
from mesh_attention.plan.language.traffic import Flows


def attention_key(op: Attention, table: Mapping[str, Buffer]) -> tuple[object, ...]:
    """Equal for attentions that take equally long. Tokens matter only to calls by row ranges."""
    q, k = table[op.q.buffer], table[op.k.buffer]
    if any(call.kind is CallKind.RANGE for call in op.calls):
        return op, q, k
    return op, q.num_heads, k.num_heads


class CallSeconds:
    def __init__(self, plan: Plan, direction: Direction, target: Target) -> None:
        p = plan.problem
        self._heads = HeadSizes(p.head_dim, p.v_dim, p.element_bytes, p.accumulate_bytes)
        self._backward = direction is Direction.BACKWARD
        self._gpu, self._target, self._direction = target.gpu, target, direction
        self.pairs = CallPairs(plan)
        self._known: dict[tuple[object, ...], float] = {}

    def attention(self, op: Attention, table: Mapping[str, Buffer]) -> float:
        """The seconds of all calls of an attention, without merges."""
        key = attention_key(op, table)
        if key not in self._known:
            total = 0.0
            for call in op.calls:
                rates = self._target.kernels[call.kernel].of(self._direction)
                assert rates is not None
                total += self.kernel(rates, self.size(op, table, call)) or 0.0
            self._known[key] = total
        return self._known[key]

    def size(self, op: Attention, table: Mapping[str, Buffer], call: Call) -> CallSize:
        return CallSize(
            call.kind,
            call.q_stop - call.q_start,
            call.k_stop - call.k_start,
            self.pairs(op, table, call),
            op.q.num_heads(table[op.q.buffer]),
            op.k.num_heads(table[op.k.buffer]),
        )

    def kernel(self, rates: PassRates, size: CallSize, rounds: float | None = None) -> float | None:
        flops = self._heads.flops(size, backward=self._backward)
        return kernel_seconds(rates, self._gpu, size, flops, rounds=rounds)

    def merge(self, size: CallSize, fresh: tuple[bool, bool]) -> float:
        """The seconds to merge the results of a call."""
        moved = self._heads.result_bytes(size, fresh, backward=self._backward)
        return memory_seconds(self._gpu, moved)

    @staticmethod
    def fresh(op: Attention) -> tuple[bool, bool]:
        """Whether accumulators hold nothing yet: out or the gradient of q, and those of k and v."""
        return (op.fresh, False) if isinstance(op, Attend) else (op.fresh_q, op.fresh_kv)


class TransferCosts:
    def __init__(self, links: Links, plan: Plan, pass_: Pass) -> None:
        self._links = links
        self._devices, self._groups = plan.devices, pass_.groups
        self.shape = cache(self._shape)

    def _shape(self, group: str) -> GroupShape:
        devices = [self._devices[rank] for rank in self._groups[group]]
        return GroupShape.of(self._links, tuple(devices))

    def collective(self, op: Collective, flows: Flows, member: int) -> float:
        """The seconds that this member takes; the group is done when its slowest member is."""
        shape = self.shape(op.group)
        if isinstance(op, AllToAll):
            received = {other: num_bytes for other, (num_bytes, _) in flows.received.items()}
            return all_to_all_seconds(self._links, shape, flows.sent, received, member)
        return ring_seconds(self._links, shape, flows.received[0][0])

    def flow(self, source: int, target: int, num_bytes: int) -> float:
        return flow_seconds(self._links, source, target, num_bytes)
