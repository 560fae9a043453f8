"""Seconds of the communication operations when nothing disturbs them (algorithm.md, section 10).

A collective is a pipelined ring: what enters a node passes its NICs while it is handed on inside
the node, so the slower of the two counts, after a latency for each hop. Every link of a ring
carries the parts of all members but one, also the link into a node, whose own parts come round
again; that is spread over the NICs of the members there. An all-to-all is flows to all members at
once (NCCL has no other than grouped sends and receives): each no faster than point-to-point, those
that leave through one NIC together, of all members behind it, no faster than many flows there are,
and each a message of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mesh_attention.machine.cluster import Links


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How a group lies on the nodes, which decides what its transfers cost."""

    nodes: tuple[int, ...]  # of each member, in the order in which members come to them
    num_nodes: int
    crossing: float  # parts that enter the busiest NIC: all of a ring / NICs of the members there
    behind_nic: tuple[int, ...]  # for each member: how many have its NIC
    several_in_a_node: bool

    @staticmethod
    def of(links: Links, devices: tuple[int, ...]) -> GroupShape:
        places: dict[int, int] = {}
        nodes = tuple([places.setdefault(links.node_of(d), len(places)) for d in devices])
        members = Counter(nodes)
        nic_of = [links.nic_of(device) for device in devices]
        sharing = Counter(nic_of)
        per_node = Counter(node for node, _ in sharing)
        crossing = (len(nodes) - 1) / min(per_node.values()) if len(members) > 1 else 0.0
        return GroupShape(
            nodes,
            len(members),
            crossing,
            behind_nic=tuple(sharing[nic] for nic in nic_of),
            several_in_a_node=max(members.values()) > 1,
        )


def ring_seconds(links: Links, shape: GroupShape, part_bytes: int) -> float:
    """An all-gather or a reduce-scatter of parts of so many bytes."""
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
    """As the member at this place sees it: bytes that it sends and receives, by member."""
    if len(shape.nodes) == 1:
        return 0.0
    here, many = shape.nodes[at], links.network.many_peers
    sharing = shape.behind_nic[at]
    nodes, slowest = shape.nodes, 0.0
    for direction in (sent, received):
        crossing = [size for m, size in direction.items() if size and nodes[m] != here]
        inside = sum(direction.values()) - direction.get(at, 0) - sum(crossing)
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
