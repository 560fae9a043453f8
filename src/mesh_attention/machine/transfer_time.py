"""Seconds of the communication operations when nothing disturbs them (algorithm.md, section 10).

`plan/passes/seconds.py` asks for the transfers of plans, `step/costs.py` for those of parameters.

A collective is a pipelined ring: parts enter a node through its NICs while the node hands others
on, so the slower of the two counts, after a latency for each hop. Every link carries the parts of
all members but one; the NICs of a node's members share the load of the link into the node.

An all-to-all is a flow to every member at once, as NCCL makes it of grouped sends and receives.
Each flow is no faster than point-to-point. The flows of all members behind one NIC share the rate
that the NIC has for many peers, and each flow to another node adds the time of a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mesh_attention.machine.cluster import Links


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How a group lies on the nodes, which decides what its transfers cost."""

    nodes: tuple[int, ...]  # of each member; the first member's node is 0, the next new node 1
    num_nodes: int
    crossing: float  # parts of a ring that enter the busiest NIC
    behind_nic: tuple[int, ...]  # for each member: how many members share its NIC
    several_in_a_node: bool

    @staticmethod
    def of(links: Links, devices: tuple[int, ...]) -> GroupShape:
        numbers: dict[int, int] = {}
        nodes = tuple([numbers.setdefault(links.node_of(d), len(numbers)) for d in devices])
        members = Counter(nodes)
        nic_of = [links.nic_of(device) for device in devices]
        sharing = Counter(nic_of)
        nics = Counter(node for node, _ in sharing)  # of each node
        crossing = (len(nodes) - 1) / min(nics.values()) if len(members) > 1 else 0.0
        return GroupShape(
            nodes,
            len(members),
            crossing,
            behind_nic=tuple(sharing[nic] for nic in nic_of),
            several_in_a_node=max(members.values()) > 1,
        )


def ring_seconds(links: Links, shape: GroupShape, part_bytes: int) -> float:
    """An all-gather or a reduce-scatter with `part_bytes` of each member."""
    inside, network = links.node.collective, links.network.collective
    size = len(shape.nodes)
    if size == 1:
        return 0.0
    local_hops, network_hops = size - shape.num_nodes, shape.num_nodes - 1
    base = network.base_microseconds if network_hops else inside.base_microseconds
    latency = base + local_hops * inside.hop_microseconds + network_hops * network.hop_microseconds
    crossing = shape.crossing * part_bytes / (network.gb_per_second * 1e9)
    handing_on = 0.0
    if shape.several_in_a_node:
        handing_on = (size - 1) * part_bytes / (inside.gb_per_second * 1e9)
    return latency * 1e-6 + max(crossing, handing_on)


def all_to_all_seconds(
    links: Links, shape: GroupShape, sent: Mapping[int, int], received: Mapping[int, int], at: int
) -> float:
    """For the member at place `at`, which sends and receives these bytes by member."""
    if len(shape.nodes) == 1:
        return 0.0
    nodes, sharing, many = shape.nodes, shape.behind_nic[at], links.network.many_peers
    slowest = 0.0
    for flows in (sent, received):
        crossing = [size for m, size in flows.items() if size and nodes[m] != nodes[at]]
        inside = sum(flows.values()) - flows.get(at, 0) - sum(crossing)
        slowest = max(
            slowest,
            inside / (links.node.all_to_all_gb_per_second * 1e9),
            len(crossing) * many.message_microseconds * 1e-6
            + sharing * sum(crossing) / (many.gb_per_second * 1e9),
            max(crossing, default=0) / (links.network.peer.gb_per_second * 1e9),
        )
    link = links.network if shape.num_nodes > 1 else links.node
    return link.collective.base_microseconds * 1e-6 + slowest


def flow_seconds(links: Links, source: int, target: int, num_bytes: int) -> float:
    """Point-to-point between two devices."""
    inside = links.node_of(source) == links.node_of(target)
    link = links.node.peer if inside else links.network.peer
    return link.latency_microseconds * 1e-6 + num_bytes / (link.gb_per_second * 1e9)
