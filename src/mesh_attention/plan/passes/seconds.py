"""Seconds of the kernel calls and of the transfers of a pass, when nothing disturbs them.

The passes choose by these times, and `cost/` adds them up. Both classes remember their results.
"""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.machine.cluster import Links
from mesh_attention.machine.kernel_facts import PassRates
from mesh_attention.machine.seconds import (
    CallSize,
    GroupShape,
    all_to_all_seconds,
    flow_seconds,
    kernel_seconds,
    memory_seconds,
    ring_seconds,
)
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.computed_pairs import CallPairs
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import (
    AllToAll,
    Attend,
    Attention,
    Call,
    Collective,
)
from mesh_attention.plan.language.traffic import Flows


class CallSeconds:
    """Times the kernel calls of one pass on a target; `pairs` counts the pairs that they show."""

    def __init__(self, plan: Plan, direction: Direction, target: Target) -> None:
        self._problem = plan.problem
        self._backward = direction is Direction.BACKWARD
        self.target, self.direction = target, direction
        self.pairs = CallPairs(plan)
        self._of_sizes: dict[tuple[int, CallSize, float | None], float | None] = {}

    def attention(self, op: Attention, table: Mapping[str, Buffer]) -> float:
        """The seconds of all calls of an attention, without merges."""
        total = 0.0
        for call, size in zip(op.calls, self.sizes(op, table), strict=True):
            rates = self.rates(call)
            assert rates is not None
            total += self.kernel(rates, size) or 0.0
        return total

    def sizes(self, op: Attention, table: Mapping[str, Buffer]) -> list[CallSize]:
        """The size of each of its calls, as `kernel` takes it."""
        heads = op.q.num_heads(table[op.q.buffer]), op.k.num_heads(table[op.k.buffer])
        sizes = []
        for call in op.calls:
            sizes.append(CallSize(call.kind, *call.size, self.pairs(op, table, call), *heads))
        return sizes

    def rates(self, call: Call) -> PassRates | None:
        """Of its kernel; None before one is chosen."""
        rates = self.target.kernels.get(call.kernel)
        return None if rates is None else rates.of(self.direction)

    def kernel(self, rates: PassRates, size: CallSize, rounds: float | None = None) -> float | None:
        """Of one call by a kernel with these rates; as `kernel_seconds`, None where it has none."""
        key = (id(rates), size, rounds)  # the target has the rates
        if key not in self._of_sizes:
            p = self._problem
            flops = 2.0 * size.pairs * size.heads * (p.head_dim + p.v_dim)
            flops = 2.5 * flops if self._backward else flops
            seconds = kernel_seconds(rates, self.target.gpu, size, flops, rounds=rounds)
            self._of_sizes[key] = seconds
        return self._of_sizes[key]

    def merge(self, size: CallSize, fresh: tuple[bool, bool]) -> float:
        """The seconds to add the results of a call to their accumulators: out, or the gradient of q
        and those of k and v. An accumulator that is `fresh` is written without being read."""
        p = self._problem
        once, once_kv = (p.element_bytes + (1 if new else 2) * p.accumulate_bytes for new in fresh)
        if self._backward:
            moved = size.rows * size.heads * p.head_dim * once
            moved += size.columns * size.kv_heads * (p.head_dim + p.v_dim) * once_kv
        else:
            moved = size.rows * size.heads * p.v_dim * once
        return memory_seconds(self.target.gpu, moved)

    @staticmethod
    def fresh(op: Attention) -> tuple[bool, bool]:
        """Whether accumulators hold nothing yet: out or the gradient of q, and those of k and v."""
        return (op.fresh, False) if isinstance(op, Attend) else (op.fresh_q, op.fresh_kv)


class TransferCosts:
    """Times the collectives and the single transfers of one pass on the links of a cluster."""

    def __init__(self, links: Links, plan: Plan, pass_: Pass) -> None:
        self._links = links
        self._devices, self._groups = plan.devices, pass_.groups
        self._shapes: dict[str, GroupShape] = {}
        self._equal: dict[GroupShape, GroupShape] = {}
        # Of groups that lie alike; flows are kept, so that no others get the same identity.
        self._rings: dict[tuple[int, int], float] = {}
        self._exchanges: dict[tuple[int, int, int], tuple[float, Flows]] = {}

    def shape(self, group: str) -> GroupShape:
        """Groups that lie alike have the same object."""
        shape = self._shapes.get(group)
        if shape is None:
            devices = tuple([self._devices[rank] for rank in self._groups[group]])
            made = GroupShape.of(self._links, devices)
            shape = self._shapes[group] = self._equal.setdefault(made, made)
        return shape

    def collective(self, op: Collective, flows: Flows, member: int) -> float:
        """The seconds that this member takes; the group is done when its slowest member is."""
        shape = self.shape(op.group)
        if not isinstance(op, AllToAll):
            part_bytes = flows.received[0][0]
            seconds = self._rings.get((id(shape), part_bytes))
            if seconds is None:
                seconds = ring_seconds(self._links, shape, part_bytes)
                self._rings[id(shape), part_bytes] = seconds
            return seconds
        known = self._exchanges.get((id(shape), id(flows), member))
        if known is None:
            received = {other: num_bytes for other, (num_bytes, _) in flows.received.items()}
            seconds = all_to_all_seconds(self._links, shape, flows.sent, received, member)
            known = self._exchanges[id(shape), id(flows), member] = seconds, flows
        return known[0]

    def flow(self, source: int, target: int, num_bytes: int) -> float:
        """Of bytes from one device to another."""
        return flow_seconds(self._links, source, target, num_bytes)
