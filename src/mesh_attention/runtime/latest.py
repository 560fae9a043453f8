"""A small cache by age: all ranks make the same calls in the same order, so it holds the same on
each of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


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
