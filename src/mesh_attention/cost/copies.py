"""Ranks that need not be simulated: they do what another does, at the same time, with other heads.

Where ranks exchange tokens for heads, rank i of every unit has the i-th share of heads, and all
head groups do the same. So one rank of each unit is enough to know when everything happens, if the
nodes are shared out alike as well and no link is shared with ranks of other head groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mesh_attention.cost.waits import Overlap, transfers_at_once
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import SendRecv


def ranks_to_simulate(plan: Plan, one: Pass, cluster: Cluster, overlap: Overlap) -> Sequence[int]:
    """The first of every `copies` ranks, where the others are like it; otherwise all."""
    everybody, firsts = range(plan.num_ranks), range(0, plan.num_ranks, one.copies)
    if one.copies == 1 or cluster.ranks_share_nics or transfers_at_once(cluster, overlap):
        return everybody
    nodes = [cluster.node_of(device) for device in plan.devices]
    if not _are_alike(nodes, one.copies) or _flows_leave_nodes(one, firsts, nodes):
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


def _flows_leave_nodes(one: Pass, ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """From one rank to another: all of those of a node divide what it can send."""
    groups = {
        op.group
        for rank in ranks
        for op in one.programs[rank].operations
        if isinstance(op, SendRecv)
    }
    return any(len({nodes[rank] for rank in one.groups[name]}) > 1 for name in groups)
