"""Simulated time: activities whose speed may change while they run.

An activity has so many seconds of work left and a speed. Whoever changes a speed settles what was
done so far; the clock then knows when each activity ends. A capacity (a NIC, the rate of a node)
is divided equally among the activities that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Activity:
    """`alone` is its speed when it shares nothing; 1 does one second of work in a second.
    `uses` are the capacities that it shares with others."""

    __slots__ = ("alone", "done", "left", "since", "speed", "uses", "version")

    def __init__(
        self, seconds: float, done: Callable[[], None], uses: tuple[Capacity, ...] = ()
    ) -> None:
        self.left = seconds
        self.done = done
        self.uses = uses
        self.alone = 1.0
        self.speed = 0.0
        self.since = 0.0
        self.version = 0


class Capacity:
    """Room for `room` activities at full speed."""

    __slots__ = ("room", "users")

    def __init__(self, room: float) -> None:
        self.room = room
        self.users: set[Activity] = set()

    def share(self) -> float:
        return min(1.0, self.room / max(1, len(self.users)))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Activity]] = []
        self._number = 0

    def start(self, activity: Activity, speed: float = 1.0) -> None:
        activity.since = self.now
        activity.alone = speed
        for capacity in activity.uses:
            capacity.users.add(activity)
        self._adjust(activity)
        self._adjust_neighbours(activity)

    def set_speed(self, activity: Activity, speed: float) -> None:
        if activity.alone != speed:
            activity.alone = speed
            self._adjust(activity)

    def shorten(self, activity: Activity, left: float) -> None:
        """No more than so many seconds of work are left of it."""
        self._adjust(activity)
        if activity.left > left:
            activity.left = left
            self._adjust(activity)

    def run(self) -> None:
        events = self._events
        while events:
            at, _, version, activity = heappop(events)
            if version != activity.version:
                continue  # its speed changed since
            self.now = at
            activity.version += 1
            for capacity in activity.uses:
                capacity.users.discard(activity)
            self._adjust_neighbours(activity)
            activity.done()

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
            speed = min(speed, activity.alone * capacity.share())
        activity.speed = speed
        activity.version += 1
        self._number += 1
        end = self.now + max(activity.left, 0.0) / speed
        heappush(self._events, (end, self._number, activity.version, activity))
