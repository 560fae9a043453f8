"""Small caches of a session: by the last use, by the last call of all ranks, by weak references.

What ranks have agreed on must be the same on each of them, also after one of them met an error. So
`AgreedCache` drops by the last call that all ranks made together, not by what one rank looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from mesh_attention.errors import MeshAttentionError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
T = TypeVar("T")


class LruCache(OrderedDict[Key, Value]):
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


class Agreed(Protocol):
    @property
    def last_call(self) -> int: ...


AgreedValue = TypeVar("AgreedValue", bound=Agreed)


class AgreedCache(dict[Key, AgreedValue]):
    """At most `limit` values that all ranks have agreed on. The value whose last call is the oldest
    goes first; among values without a call, the first that was kept."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: Key, value: AgreedValue) -> AgreedValue | None:
        """Returns the value that had to go."""
        self[key] = value
        if len(self) <= self._limit:
            return None
        return self.pop(min(self, key=lambda candidate: self[candidate].last_call))


class WeakRegistry(WeakValueDictionary[int, T]):
    """Objects that operators name by a number, since they take tensors and constants only.
    A number keeps nothing alive; `gone` is the error for an object that nobody holds any more."""

    def __init__(self, gone: str) -> None:
        super().__init__()
        self._gone = gone
        self._numbers = count(1)

    def add(self, entry: T) -> int:
        number = next(self._numbers)
        self[number] = entry
        return number

    def find(self, number: int | str) -> T:
        if not str(number).isdecimal():
            raise MeshAttentionError(
                f"{number!r} is the name of no object: call ContextParallel.attention, which calls "
                "the operators with its own"
            )
        entry = self.get(int(number))
        if entry is None:
            raise MeshAttentionError(self._gone)
        return entry
