"""Which links the ranks of a plan share, as an estimate of one rank has it: if all did the same."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.cost.operation_costs import ClusterCosts
from mesh_attention.cost.target import Compiled
from mesh_attention.machine.cluster import Cluster


class Places:
    """Of the ranks of a plan: who shares what with whom. Asked for by every transfer."""

    def __init__(self, cluster: Cluster, compiled: Compiled) -> None:
        plan, one = compiled.plan, compiled.one
        self.costs = ClusterCosts(cluster, plan, one, compiled.clock)
        per_node = cluster.node.ranks
        self.nodes = [device // per_node for device in plan.devices]
        self._cluster, self._plan, self._groups = cluster, plan, one.groups
        self._known: dict[tuple[str, int], tuple[float, bool]] = {}

    def _here(self, group: Sequence[int], at: int) -> int:
        """Members of a group in the node of one of them."""
        nodes, node = self.nodes, self.nodes[at]
        return sum([nodes[rank] == node for rank in group])

    def sharing_of_flows(self, group: Sequence[int], at: int, ends: tuple[int, int]) -> float:
        """How much longer a flow out of a node takes, if all groups of the node have one at once;
        all members there, where it goes to the place in another node that its sender has in its
        own."""
        cluster, network, here = self._cluster, self._cluster.network, self._here(group, at)
        flows = min(cluster.node.ranks, self._plan.num_ranks) / here
        source, target = map(group.index, ends)
        if (target - source) % here == 0:
            flows *= here
        room = network.peer_node_gb_per_second / network.peer.gb_per_second
        if cluster.ranks_share_nics:
            each = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
            room = min(room, each * network.nics)
        return max(1.0, flows / room)

    def collective(self, name: str, at: int) -> tuple[float, bool]:
        """The same of a collective between nodes, for NICs that ranks share; and whether it leaves
        the node."""
        known = self._known.get((name, at))
        if known is None:
            group, sharing = self._groups[name], 1.0
            leaves = self._here(group, at) < len(group)
            if leaves and self._cluster.ranks_share_nics:
                cluster, devices = self._cluster, self._plan.devices
                nic = cluster.nic_of(devices[at])
                here = sum(cluster.nic_of(devices[rank]) == nic for rank in group)
                sharing = max(1.0, cluster.node.ranks / cluster.network.nics / here)
            known = self._known[name, at] = sharing, leaves
        return known
