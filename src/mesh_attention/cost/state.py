"""The state of a simulation: the clock, the links that transfers share, and the streams of ranks.

An activity (a kernel call or a transfer) has seconds of work left and a speed. A change of speed
first subtracts the work done so far, so the clock knows when each activity ends. A capacity (a NIC,
the rate of a node, a pair of ranks) is divided equally among the activities that use it.
`simulator.py` starts activities; nothing here knows a cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush
from weakref import proxy

from mesh_attention.cost.operation_costs import TimedCall
from mesh_attention.cost.timeline import RankTimes
from mesh_attention.machine.cluster import Cluster
from mesh_attention.plan.language.program import Communication, Operation
from mesh_attention.plan.passes.compile import Waits


@dataclass(slots=True, eq=False)
class Activity:
    """At speed 1 it does a second of work in a second."""

    left: float  # seconds of work
    ended: Callable[[Activity], None]  # called with the activity
    uses: tuple[Capacity, ...] = ()  # what it shares with other activities
    slowdown: float = 0.0  # the part of its speed that a transfer loses while a member computes
    computing: int = 0  # members that compute
    alone: float = 1.0  # its speed if it had its capacities to itself
    speed: float = 0.0
    since: float = 0.0  # when `left` was true
    version: int = 0

    @property
    def disturbed_speed(self) -> float:
        return 1.0 - self.slowdown if self.computing else 1.0


@dataclass(slots=True, eq=False)
class Capacity:
    """Room for `room` activities at full speed."""

    room: float
    users: dict[Activity, None] = field(default_factory=dict)  # in the order of their beginnings


class Clock:
    """Starts activities, and calls each one's `ended` at the time at which it ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Activity]] = []
        self._number = 0

    def start(self, activity: Activity) -> None:
        activity.since, activity.alone = self.now, activity.disturbed_speed
        for capacity in activity.uses:
            capacity.users[activity] = None
        self._adjust(activity)
        self._adjust_neighbours(activity)

    def set_speed(self, activity: Activity, speed: float) -> None:
        if activity.alone != speed:
            activity.alone = speed
            self._adjust(activity)

    def shorten(self, activity: Activity, left: float) -> None:
        """At most `left` seconds of its work remain."""
        self._adjust(activity)
        if activity.left > left:
            activity.left = left
            self._adjust(activity)

    def run(self) -> None:
        events = self._events
        while events:
            at, _, version, activity = heappop(events)
            if version != activity.version:
                continue  # its speed has changed, so a later entry has its end
            self.now = at
            activity.version += 1
            for capacity in activity.uses:
                capacity.users.pop(activity, None)
            self._adjust_neighbours(activity)
            activity.ended(activity)

    def _adjust_neighbours(self, activity: Activity) -> None:
        for capacity in activity.uses:
            for other in capacity.users:
                if other is not activity:
                    self._adjust(other)

    def _adjust(self, activity: Activity) -> None:
        activity.left -= (self.now - activity.since) * activity.speed
        activity.since = self.now
        speed = activity.alone
        for capacity in activity.uses:
            if len(capacity.users) > capacity.room:
                speed = min(speed, activity.alone * (capacity.room / len(capacity.users)))
        activity.speed = speed
        activity.version += 1
        self._number += 1
        end = self.now + max(activity.left, 0.0) / speed
        heappush(self._events, (end, self._number, activity.version, activity))


class RankState:
    """One rank: the next operations of its two streams, and what it runs now.

    `calls` are the kernel calls left of the current computation, the next call last.
    `known_computing`: whether the transfers of this rank count it as computing.
    `at_once`: one thread goes through the program, and its transfers run beside each other.
    """

    def __init__(
        self, rank: int, waits: Waits, operations: tuple[Operation, ...], *, at_once: bool
    ) -> None:
        self.rank = rank
        self._at_once = at_once
        self.operations = operations
        self.times = RankTimes.of(len(operations))
        self.running: tuple[Activity, TimedCall] | None = None  # the kernel call that runs now
        self.calls: list[TimedCall] = []
        self.computing_at = 0
        self.in_flight: list[int] = []  # communications that have begun, or wait for other ranks
        self.began_idle: set[int] = set()  # those in flight that began beside no computation
        self.computed_until = -1.0  # the end of the last call
        self.is_late = False  # whether programs of the running call find no place beside those
        self.waiting: int | None = None  # a communication that finds no SM yet
        self.known_computing = False
        self.transfers: list[Activity] = []  # in flight
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
        if self._at_once and not self._is_before(self._compute, self._communication):
            return None
        return self._take(self._compute)

    def take_communication(self) -> int | None:
        """The next communication, if it can begin now."""
        if self._at_once:
            computes = self.running is not None or self.calls
            if computes or not self._is_before(self._communication, self._compute):
                return None
        elif self.in_flight or self.waiting is not None:
            return None
        return self._take(self._communication)

    def _is_before(self, stream: deque[int], other: deque[int]) -> bool:
        """Whether the next operation of `stream` comes before that of `other` in the program."""
        return bool(stream) and (not other or stream[0] < other[0])

    def finish(self, at: int, now: float) -> None:
        self._done[at] = 1
        self.times.end[at] = now

    def _take(self, stream: deque[int]) -> int | None:
        if not stream:
            return None
        done = self._done
        for before in self._waits[stream[0]]:
            if not done[before]:
                return None
        return stream.popleft()


class Capacities:
    """NICs, nodes and pairs of ranks that transfers divide. `at_once`: transfers of a rank run
    beside each other, so they divide its own links too."""

    def __init__(self, cluster: Cluster, *, at_once: bool) -> None:
        self._cluster, self._links, self._at_once = cluster, cluster.links, at_once
        network = cluster.network
        self._flows_of_nic = max(1.0, network.collective.gb_per_second / network.peer.gb_per_second)
        self._known: dict[object, Capacity] = {}
        # In a cycle with its cache it would outlive its simulation.
        self.of_flow = cache(partial(Capacities._of_flow, proxy(self)))

    def of_collective(self, devices: list[int]) -> tuple[Capacity, ...]:
        """What a collective shares: NICs, if it goes between nodes. It shares nothing where each
        rank has its own NIC and transfers of a rank follow each other."""
        if len({self._links.node_of(device) for device in devices}) == 1:
            return self._inside(devices, devices)
        if not self._cluster.ranks_share_nics and not self._at_once:
            return ()
        nics = sorted({self._links.nic_of(device) for device in devices})
        rooms: list[tuple[object, float]] = [(("nic", *nic), 1.0) for nic in nics]
        if self._at_once:  # beside flows
            ways = ("send", "receive")
            rooms += [((way, *nic), self._flows_of_nic) for nic in nics for way in ways]
        return self._get(rooms)

    def _of_flow(self, source: int, target: int) -> tuple[Capacity, ...]:
        links, network = self._links, self._links.network
        nodes = links.node_of(source), links.node_of(target)
        if nodes[0] == nodes[1]:
            return self._inside([source], [target])
        room = network.peer_node_gb_per_second / network.peer.gb_per_second
        rooms: list[tuple[object, float]] = [
            (("out", nodes[0]), room),
            (("in", nodes[1]), room),
            (("pair", min(source, target), max(source, target)), network.flows_of_a_pair),
        ]
        if self._cluster.ranks_share_nics or self._at_once:
            rooms.append((("send", *links.nic_of(source)), self._flows_of_nic))
            rooms.append((("receive", *links.nic_of(target)), self._flows_of_nic))
        return self._get(rooms)

    def _inside(self, sources: list[int], targets: list[int]) -> tuple[Capacity, ...]:
        """The links of ranks in a node."""
        if not self._at_once:
            return ()
        ends = [("from", d) for d in sources] + [("to", d) for d in targets]
        return self._get((end, 1.0) for end in ends)

    def _get(self, rooms: Iterable[tuple[object, float]]) -> tuple[Capacity, ...]:
        return tuple(self._known.setdefault(key, Capacity(room)) for key, room in rooms)
