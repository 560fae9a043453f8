"""The state of a simulation: each rank's two streams, the transfers in flight, and what they share.

A transfer uses NICs, the point-to-point capacity of nodes, and pairs of ranks; several that use the
same one divide it (`clock.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from mesh_attention.cost.clock import Activity, Capacity
from mesh_attention.cost.timed_call import TimedCall
from mesh_attention.cost.timeline import RankTimes
from mesh_attention.cost.waits import WaitsOfOps
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.program import Communication, Operation


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
    were last told about it. `at_once`: one thread goes through the program, and transfers that it
    began run beside each other.
    """

    def __init__(
        self, rank: int, waits: WaitsOfOps, operations: tuple[Operation, ...], *, at_once: bool
    ) -> None:
        self.rank = rank
        self._at_once = at_once
        self.operations = operations
        self.times = RankTimes.of(len(operations))
        self.computation: Activity | None = None  # a kernel call
        self.call: TimedCall | None = None
        self.calls: list[TimedCall] = []
        self.computing_at = 0
        self.in_flight: list[int] = []  # communications, and those that wait for other ranks
        self.began_idle: set[int] = set()  # those in flight that began while nothing was computed
        self.computed_until = -1.0  # the end of the last call
        self.is_late = False  # whether the call that runs has programs that found no place
        self.waiting: int | None = None  # a communication that finds no SM yet
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

    def issued(self, before: int) -> Iterator[int]:
        """Communications that come before this operation, and are in flight or about to be."""
        waiting = () if self.waiting is None else (self.waiting,)
        for at in chain(self.in_flight, waiting, self._communication):
            if at >= before:
                return
            yield at

    def take_computation(self) -> int | None:
        """The next computation, if it can begin now."""
        if self._at_once and not self._is_before(self._compute, self._communication):
            return None
        return self._take(self._compute)

    def take_communication(self) -> int | None:
        """The next communication, if it can begin now."""
        if self._at_once:
            computes = self.computation is not None or self.calls
            if computes or not self._is_before(self._communication, self._compute):
                return None
        elif self.in_flight or self.waiting is not None:
            return None
        return self._take(self._communication)

    def _is_before(self, stream: deque[int], other: deque[int]) -> bool:
        """Whether the next of one stream comes before that of the other in the program."""
        return bool(stream) and (not other or stream[0] < other[0])

    def finish(self, at: int, now: float) -> None:
        self._done[at] = 1
        self.times.end[at] = now

    def _take(self, stream: deque[int]) -> int | None:
        done = self._done
        if stream and all(done[before] for before in self._waits[stream[0]]):
            return stream.popleft()
        return None


class Capacities:
    """What transfers of a cluster divide among themselves, each thing once. `at_once`: those of a
    rank run beside each other, and so divide its own links too."""

    def __init__(self, cluster: Cluster, *, at_once: bool) -> None:
        self._cluster, self._at_once = cluster, at_once
        network = cluster.network
        # Flows for which a NIC has room.
        self._flows = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
        self._known: dict[object, Capacity] = {}

    def of_collective(self, devices: list[int]) -> tuple[Capacity, ...]:
        """NICs that it uses between nodes; where each rank has its own they are never shared by
        transfers that follow each other."""
        cluster = self._cluster
        if len({cluster.node_of(d) for d in devices}) == 1:
            return self._inside(devices, devices)
        if not cluster.ranks_share_nics and not self._at_once:
            return ()
        nics = sorted({cluster.nic_of(device) for device in devices})
        things: list[tuple[object, float]] = [(("nic", *nic), 1.0) for nic in nics]
        if self._at_once:  # beside flows
            things += [((way, *nic), self._flows) for nic in nics for way in ("send", "receive")]
        return self._get(things)

    def _inside(self, sources: list[int], targets: list[int]) -> tuple[Capacity, ...]:
        """The links of ranks in a node."""
        if not self._at_once:
            return ()
        ends = [("from", d) for d in sources] + [("to", d) for d in targets]
        return self._get((end, 1.0) for end in ends)

    def of_flow(self, source: int, target: int) -> tuple[Capacity, ...]:
        cluster = self._cluster
        if cluster.node_of(source) == cluster.node_of(target):
            return self._inside([source], [target])
        network = cluster.network
        room = network.peer_node_gb_per_second / network.peer.gb_per_second
        things: list[tuple[object, float]] = [
            (("out", cluster.node_of(source)), room),
            (("in", cluster.node_of(target)), room),
            (("pair", min(source, target), max(source, target)), network.flows_of_a_pair),
        ]
        if cluster.ranks_share_nics or self._at_once:
            things.append((("send", *cluster.nic_of(source)), self._flows))
            things.append((("receive", *cluster.nic_of(target)), self._flows))
        return self._get(things)

    def _get(self, things: Iterable[tuple[object, float]]) -> tuple[Capacity, ...]:
        return tuple(self._known.setdefault(thing, Capacity(room)) for thing, room in things)
