"""Simulated time: activities whose speed may change while they run.

An activity has so many seconds of work left and a speed. Whoever changes a speed settles what was
done so far; the clock then knows when each activity ends. Shared things (a NIC, the point-to-point
capacity of a node) divide themselves equally among the activities that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

__all__ = ["Activity", "Clock", "Shared"]


class Activity:
    """`alone` is its speed when it shares nothing; 1 does one second of work in a second."""

    __slots__ = ("alone", "done", "left", "shares", "since", "speed", "version")

    def __init__(
        self, seconds: float, done: Callable[[], None], shares: tuple[Shared, ...] = ()
    ) -> None:
        self.left = seconds
        self.done = done
        self.shares = shares
        self.alone = 1.0
        self.speed = 0.0
        self.since = 0.0
        self.version = 0


class Shared:
    """Something with room for `room` activities at full speed."""

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
        for shared in activity.shares:
            shared.users.add(activity)
        self._adjust(activity)
        self._adjust_neighbours(activity)

    def set_speed(self, activity: Activity, speed: float) -> None:
        if activity.alone != speed:
            activity.alone = speed
            self._adjust(activity)

    def run(self) -> None:
        events = self._events
        while events:
            at, _, version, activity = heappop(events)
            if version != activity.version:
                continue  # its speed changed since
            self.now = at
            activity.version += 1
            for shared in activity.shares:
                shared.users.discard(activity)
            self._adjust_neighbours(activity)
            activity.done()

    def _adjust_neighbours(self, activity: Activity) -> None:
        for shared in activity.shares:
            for other in shared.users:
                if other is not activity:
                    self._adjust(other)

    def _adjust(self, activity: Activity) -> None:
        activity.left -= (self.now - activity.since) * activity.speed
        activity.since = self.now
        speed = activity.alone
        for shared in activity.shares:
            speed = min(speed, activity.alone * shared.share())
        activity.speed = speed
        activity.version += 1
        self._number += 1
        end = self.now + max(activity.left, 0.0) / speed
        heappush(self._events, (end, self._number, activity.version, activity))
