"""What a simulation works out once for many ranks.

Where ranks exchange tokens for heads, rank i of every unit has the i-th share of heads, and all
head groups do the same at the same time: `ranks_to_simulate` names one rank of each unit.
Programs whose buffers differ in nothing but the places of their rows are alike (`Alike`): an
operation that they have in common costs the same on all, and they wait alike. `SharedWork`
remembers both. Only row ranges depend on places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mesh_attention.cost.operation_costs import (
    Compiled,
    Overlap,
    TimedCall,
    transfers_at_once,
    waits_of_rank,
)
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import (
    AllToAll,
    Attention,
    CallKind,
    Collective,
    Communication,
    Free,
    Operation,
    SendRecv,
)
from mesh_attention.plan.language.traffic import Flows, far_bytes, traffic_of
from mesh_attention.plan.language.workspace import Alike
from mesh_attention.plan.passes.compile import Waits


def ranks_to_simulate(plan: Plan, pass_: Pass, cluster: Cluster, overlap: Overlap) -> Sequence[int]:
    """The first of every `copies` ranks if the others do the same; otherwise all ranks."""
    everybody, firsts = range(plan.num_ranks), range(0, plan.num_ranks, pass_.copies)
    if pass_.copies == 1 or cluster.ranks_share_nics or transfers_at_once(cluster, overlap):
        return everybody
    nodes = cluster.links.nodes_of(plan.devices)
    if not _are_alike(nodes, pass_.copies) or _flows_leave_nodes(pass_, firsts, nodes):
        return everybody
    return firsts


def _are_alike(nodes: Sequence[int], copies: int) -> bool:
    """Whether every unit has as many ranks in each node that it is in, and every head group is
    spread over nodes as the others are."""
    units = [nodes[at : at + copies] for at in range(0, len(nodes), copies)]
    if len({count for unit in units for count in Counter(unit).values()}) > 1:
        return False
    patterns = {tuple(map(group.index, group)) for group in zip(*units, strict=True)}
    return len(patterns) == 1


def _flows_leave_nodes(pass_: Pass, ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether ranks send to other nodes: then all flows of a node divide its rate."""
    groups = {
        op.group
        for rank in ranks
        for op in pass_.programs[rank].operations
        if isinstance(op, SendRecv)
    }
    return any(len({nodes[rank] for rank in pass_.groups[name]}) > 1 for name in groups)


class SharedWork:
    """Waits of each rank, and kernel calls, flows and bytes of its operations, remembered."""

    def __init__(
        self, compiled: Compiled, cluster: Cluster, overlap: Overlap, ranks: Sequence[int]
    ) -> None:
        self._compiled, self._overlap = compiled, overlap
        self._at_once, self._alike = transfers_at_once(cluster, overlap), Alike()
        self.nodes = cluster.links.nodes_of(compiled.plan.devices)
        self.workspace_bytes = 0  # of the ranks asked for so far, the most
        self._waits: dict[object, Waits] = {}
        self._tables: dict[int, tuple[int, Mapping[str, Buffer]]] = {}
        # By the number of a table of buffers.
        self._calls: defaultdict[int, dict[Operation, tuple[TimedCall, ...]]] = defaultdict(dict)
        self._bytes: dict[tuple[int, int, int], tuple[int, int, Flows]] = {}
        for rank in ranks:
            program = compiled.pass_.programs[rank]
            number = compiled.tables.get(rank)
            if number is None:
                number = self._alike.table(program)
            self._tables[rank] = number, program.buffer_table()

    def waits(self, rank: int) -> Waits:
        waits = self._compiled.waits.get(rank)
        key: object = id(waits)
        if waits is None:
            key = self._tables[rank][0], self._alike.uses(self._compiled.pass_.programs[rank])
        known = self._waits.get(key)
        if known is None:
            known, num_bytes = waits_of_rank(
                self._compiled, rank, self._overlap, at_once=self._at_once
            )
            self.workspace_bytes = max(self.workspace_bytes, num_bytes)
            self._waits[key] = known
        return known

    def calls(self, rank: int, op: Operation) -> tuple[TimedCall, ...]:
        """The kernel calls of an operation in turn; none where there is nothing to do."""
        if isinstance(op, Free):
            return ()
        number, table = self._tables[rank]
        known = self._calls[number]
        calls = known.get(op)
        if calls is None:
            calls = tuple([x for x in self._compiled.costs.compute(op, table) if x.seconds])
            if not isinstance(op, Attention) or all(x.kind is not CallKind.RANGE for x in op.calls):
                known[op] = calls
        return calls

    def flows(self, rank: int, op: Communication) -> Flows:
        return self._compiled.flows.of(op, *self._tables[rank])

    def received_bytes(self, op: Collective, flows: Flows, member: int) -> tuple[int, int]:
        """The bytes that a member receives, and those of them that come from other nodes."""
        shape = self._compiled.transfers.shape(op.group)
        nodes, key = shape.nodes, (id(shape), id(flows), member)
        if not isinstance(op, AllToAll):
            size = flows.received[0][0]
            return (len(nodes) - 1) * size, (len(nodes) - nodes.count(nodes[member])) * size
        known = self._bytes.get(key)
        if known is None:
            received = traffic_of(op, flows, member, len(nodes)).received_bytes
            far = far_bytes(op, flows, [node != nodes[member] for node in nodes])
            known = self._bytes[key] = received, far, flows
        return known[:2]
