"""Small caches by age.

What ranks have agreed on must be the same on each of them, also after one of them was told of a
mistake: it goes by the last call that all ranks were at, not by what a rank was about to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Used(Protocol):
    @property
    def last_call(self) -> int: ...


Agreed = TypeVar("Agreed", bound=Used)


class Latest(OrderedDict[Key, Value]):
    """The values used last, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def find(self, key: Key) -> Value | None:
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]

    def keep(self, key: Key, value: Value) -> Value:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
        return value


class LatestAgreed(dict[Key, Agreed]):
    """At most `limit` values that all ranks have agreed on. The one goes first whose last call is
    the longest ago; of several without one the first that was kept."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: Key, value: Agreed) -> Agreed:
        self[key] = value
        if len(self) > self._limit:
            del self[min(self, key=lambda one: self[one].last_call)]
        return value
