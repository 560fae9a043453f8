"""Objects that compiled code names by a number, since graphs hold tensors and constants only.

They are found again for as long as somebody holds them: being named keeps nothing alive.
"""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from mesh_attention.errors import MeshAttentionError

T = TypeVar("T")


class Registered(Generic[T]):
    """`gone`: what to say of an object that nobody holds any more."""

    def __init__(self, gone: str) -> None:
        self._gone = gone
        self._numbers = count(1)
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, one: T) -> int:
        number = next(self._numbers)
        self._objects[number] = one
        return number

    def find(self, number: int) -> T:
        found = self._objects.get(number)
        if found is None:
            raise MeshAttentionError(self._gone)
        return found
