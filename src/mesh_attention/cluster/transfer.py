"""A communication under way, and what it shares with others: NICs, nodes, pairs of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_attention.cluster.clock import Activity, Shared
from mesh_attention.cluster.cluster import Cluster

__all__ = ["Shares", "Transfer"]


class Transfer:
    """A communication under way. Computation of any member slows all of it."""

    __slots__ = ("activity", "computing", "held_up")

    def __init__(self, activity: Activity, held_up: float) -> None:
        self.activity = activity
        self.held_up = held_up
        self.computing = 0  # members that compute at the same time

    @property
    def speed(self) -> float:
        return 1.0 - self.held_up if self.computing else 1.0


class Shares:
    """What transfers of a cluster divide among themselves, each thing once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[object, Shared] = {}

    def of_collective(self, devices: list[int]) -> tuple[Shared, ...]:
        """NICs that it uses between nodes; where each rank has its own they are never shared."""
        cluster = self._cluster
        if not cluster.ranks_share_nics or len({cluster.node_of(d) for d in devices}) == 1:
            return ()
        nics = sorted({("nic", *cluster.nic_of(device)) for device in devices})
        return self._get((nic, 1.0) for nic in nics)

    def of_flow(self, source: int, target: int) -> tuple[Shared, ...]:
        cluster = self._cluster
        if cluster.node_of(source) == cluster.node_of(target):
            return ()
        network = cluster.network
        room = network.peer_node_gb_per_second / network.peer.gb_per_second
        things: list[tuple[object, float]] = [
            (("out", cluster.node_of(source)), room),
            (("in", cluster.node_of(target)), room),
            (("pair", min(source, target), max(source, target)), network.flows_of_a_pair),
        ]
        if cluster.ranks_share_nics:
            flows = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
            things.append((("send", *cluster.nic_of(source)), flows))
            things.append((("receive", *cluster.nic_of(target)), flows))
        return self._get(things)

    def _get(self, things: Iterable[tuple[object, float]]) -> tuple[Shared, ...]:
        return tuple(self._known.setdefault(thing, Shared(room)) for thing, room in things)
