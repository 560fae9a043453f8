"""What a simulation works out once for many ranks.

Where ranks exchange tokens for heads, rank i of every unit has the i-th share of heads, and all
head groups do the same at the same time: `ranks_to_simulate` names one rank of each unit.
Programs whose buffers differ in nothing but the places of their rows are alike (`Alike`): an
operation that they have in common costs the same on all, and they wait alike. `SharedWork`
remembers both. Only row ranges depend on places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mesh_attention.cost.operation_costs import OperationCosts, TimedCall
from mesh_attention.cost.waits import Overlap, WaitsOfOps, transfers_at_once, waits_of_rank
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import (
    Attention,
    CallKind,
    Communication,
    Free,
    Operation,
    SendRecv,
)
from mesh_attention.plan.language.traffic import Flows, TrafficMeter
from mesh_attention.plan.language.workspace import Alike


def ranks_to_simulate(plan: Plan, pass_: Pass, cluster: Cluster, overlap: Overlap) -> Sequence[int]:
    """The first of every `copies` ranks if the others do as it does; otherwise all ranks."""
    everybody, firsts = range(plan.num_ranks), range(0, plan.num_ranks, pass_.copies)
    if pass_.copies == 1 or cluster.ranks_share_nics or transfers_at_once(cluster, overlap):
        return everybody
    nodes = [cluster.node_of(device) for device in plan.devices]
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
    """Waits of each rank, and kernel calls and flows of its operations."""

    def __init__(
        self,
        plan: Plan,
        pass_: Pass,
        costs: OperationCosts,
        overlap: Overlap,
        ranks: Sequence[int],
        *,
        at_once: bool,
        compiled: Mapping[int, WaitsOfOps],
    ) -> None:
        """`compiled`: waits of ranks whose programs were compiled just now."""
        self._plan, self._pass, self._costs, self._overlap = plan, pass_, costs, overlap
        self._at_once, self._compiled, self._alike = at_once, compiled, Alike()
        self.workspace_bytes = 0  # of the ranks asked for so far, the most
        self._waits: dict[object, WaitsOfOps] = {}
        programs = {rank: pass_.programs[rank] for rank in ranks}
        numbers = {rank: self._alike.table(program) for rank, program in programs.items()}
        self._tables = {rank: program.buffer_table() for rank, program in programs.items()}
        calls: dict[int, dict[Operation, tuple[TimedCall, ...]]] = {}
        flows: dict[int, dict[Operation, Flows]] = {}
        meters: dict[int, TrafficMeter] = {}
        for rank, number in numbers.items():
            if number not in meters:
                meters[number] = TrafficMeter(plan.problem, self._tables[rank])
        self._meters = {rank: meters[number] for rank, number in numbers.items()}
        self._calls = {rank: calls.setdefault(number, {}) for rank, number in numbers.items()}
        self._flows = {rank: flows.setdefault(number, {}) for rank, number in numbers.items()}

    def waits(self, rank: int) -> WaitsOfOps:
        compiled = self._compiled.get(rank)
        program = self._pass.programs[rank]
        key = self._alike.uses(program) if compiled is None else id(compiled)
        known = self._waits.get(key)
        if known is None:
            known, num_bytes = waits_of_rank(
                self._plan,
                self._pass,
                self._overlap,
                rank,
                at_once=self._at_once,
                waits=compiled,
            )
            self.workspace_bytes = max(self.workspace_bytes, num_bytes)
            self._waits[key] = known
        return known

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

    def flows(self, rank: int, op: Communication) -> Flows:
        if isinstance(op, SendRecv):  # ranks of a ring have other peers, and so other operations
            return self._meters[rank].flows(op)
        known = self._flows[rank].get(op)
        if known is None:
            known = self._flows[rank][op] = self._meters[rank].flows(op)
        return known
