"""Who holds which KV head after an exchange of tokens for heads, and where its gradients arrive.

With fewer KV heads than ranks, and wherever a share of the query heads ends inside a KV group, a KV
head is held by several head groups. Each of them has the gradients of its own query heads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.methods.parts.head_group import HeadGroup


class Part(NamedTuple):
    """Heads of a head group whose results arrive in one buffer of their owner."""

    copy: str  # how that buffer is called behind the kind: nothing, or `.copy1`
    there: tuple[int, int]  # the heads inside it
    here: tuple[int, int] | None  # inside the head group's own; None: all of them


class Holders:
    """The head groups that hold each KV head. Where there are several, each has a part of the
    gradients: those arrive in copies, copy c from the c-th of them, and are added by the owner."""

    def __init__(self, head_groups: list[HeadGroup]) -> None:
        held = [group.heads(Kind.K) for group in head_groups]
        self._first: dict[int, int] = {}
        times = [0] * head_groups[0].problem.kv_heads
        for index, (low, high) in enumerate(held):
            for head in range(low, high):
                self._first.setdefault(head, index)
                times[head] += 1
        self._times = times
        self._parts: dict[int, tuple[list[Part], list[Part]]] = {}  # asked for by every portion
        # A copy has room from the first head that comes to it to the last.
        self.copies: list[tuple[int, int]] = []
        for copy in range(max(times) if max(times) > 1 else 0):
            heads = [head for head, count in enumerate(times) if count > max(copy, 1)]
            self.copies.append((heads[0], heads[-1] + 1))
        # The heads of each sum, and where they lie in each copy; None is all of a buffer.
        self.sums = [
            (_inside((first, stop), (0, len(times))), self._in_copies(first, stop))
            for first, stop in _runs(times)
            if times[first] > 1
        ]

    def _in_copies(self, first: int, stop: int) -> list[tuple[int, int] | None]:
        return [_inside((first, stop), self.copies[copy]) for copy in range(self._times[first])]

    def parts(self, group: HeadGroup) -> tuple[list[Part], list[Part]]:
        """Of its query heads, and of its KV heads."""
        found = self._parts.get(group.index)
        if found is None:
            found = [Part("", group.heads(Kind.Q), None)], self._key_parts(group)
            self._parts[group.index] = found
        return found

    def _key_parts(self, group: HeadGroup) -> list[Part]:
        low, high = held = group.heads(Kind.K)
        if not self.copies:
            return [Part("", held, None)]
        alone = -1
        copies = [
            group.index - self._first[head] if self._times[head] > 1 else alone
            for head in range(low, high)
        ]
        made = []
        for a, b in _runs(copies):
            copy, heads = copies[a], (low + a, low + b)
            start = 0 if copy == alone else self.copies[copy][0]
            name = "" if copy == alone else f".copy{copy}"
            there = (heads[0] - start, heads[1] - start)
            made.append(Part(name, there, _inside(heads, held)))
        return made


def _inside(heads: tuple[int, int], buffer: tuple[int, int]) -> tuple[int, int] | None:
    """Heads counted inside a buffer; None if they are all that it has."""
    return None if heads == buffer else (heads[0] - buffer[0], heads[1] - buffer[0])


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Where neighbours are equal: first and one past the last.

    >>> _runs([2, 2, 1])
    [(0, 2), (2, 3)]
    """
    changes = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    return list(pairwise([0, *changes, len(values)]))
