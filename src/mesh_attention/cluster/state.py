"""The state of a simulation: each rank's two streams, the transfers in flight, and what they share.

A transfer uses NICs, the point-to-point capacity of nodes, and pairs of ranks; several that use the
same one divide it (`clock.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from mesh_attention.cluster.clock import Activity, Capacity
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.compute_cost import TimedCall
from mesh_attention.cluster.timeline import RankTimes
from mesh_attention.cluster.waits import WaitsOfOps
from mesh_attention.plan.program import Communication, Operation


class Transfer:
    """A communication in flight. Computation of any member slows all of it."""

    __slots__ = ("activity", "computing", "slowdown")

    def __init__(
        self,
        seconds: float,
        uses: tuple[Capacity, ...],
        slowdown: float,
        ended: Callable[[Transfer], None],
    ) -> None:
        self.activity = Activity(seconds, partial(ended, self), uses)
        self.slowdown = slowdown
        self.computing = 0  # members that compute at the same time

    @property
    def speed(self) -> float:
        return 1.0 - self.slowdown if self.computing else 1.0


class RankState:
    """What is next on the compute and on the communication stream of a rank, and what is done.

    `calls` are the kernel calls that are left of the current computation, the next one last, and
    `call` is the one that runs, if any does. `known_computing` is what the transfers of this rank
    were last told about it.
    """

    def __init__(self, rank: int, waits: WaitsOfOps, operations: tuple[Operation, ...]) -> None:
        self.rank = rank
        self.operations = operations
        self.times = RankTimes.of(len(operations))
        self.computation: Activity | None = None  # a kernel call
        self.call: TimedCall | None = None
        self.calls: list[TimedCall] = []
        self.computing_at = 0
        self.communicating = False
        self.known_computing = False
        self.transfers: list[Transfer] = []
        self._waits = waits
        self._done = bytearray(len(operations))
        self._compute: deque[int] = deque()
        self._communication: deque[int] = deque()
        for at, op in enumerate(operations):
            (self._communication if isinstance(op, Communication) else self._compute).append(at)

    @property
    def finished(self) -> bool:
        return all(self._done)

    def take_computation(self) -> int | None:
        """The next computation, if it can begin now."""
        return self._take(self._compute)

    def take_communication(self) -> int | None:
        """The next communication, if it can begin now and none is in flight."""
        return None if self.communicating else self._take(self._communication)

    def finish(self, at: int, now: float) -> None:
        self._done[at] = 1
        self.times.end[at] = now

    def _take(self, stream: deque[int]) -> int | None:
        done = self._done
        if stream and all(done[before] for before in self._waits[stream[0]]):
            return stream.popleft()
        return None


class Capacities:
    """What transfers of a cluster divide among themselves, each thing once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[object, Capacity] = {}

    def of_collective(self, devices: list[int]) -> tuple[Capacity, ...]:
        """NICs that it uses between nodes; where each rank has its own they are never shared."""
        cluster = self._cluster
        if not cluster.ranks_share_nics or len({cluster.node_of(d) for d in devices}) == 1:
            return ()
        nics = sorted({("nic", *cluster.nic_of(device)) for device in devices})
        return self._get((nic, 1.0) for nic in nics)

    def of_flow(self, source: int, target: int) -> tuple[Capacity, ...]:
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

    def _get(self, things: Iterable[tuple[object, float]]) -> tuple[Capacity, ...]:
        return tuple(self._known.setdefault(thing, Capacity(room)) for thing, room in things)
