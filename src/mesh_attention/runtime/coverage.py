"""Which call is the first to touch a row: it stores, all later ones add.

So accumulators need no pass that clears them; only rows that no call touches are cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Coverage", "Stretch", "coverage"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows `start..stop` of the accumulator; `fresh` if they hold nothing yet."""

    start: int
    stop: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    stretches: tuple[tuple[Stretch, ...], ...]  # of each interval, in its order
    untouched: tuple[tuple[int, int], ...]


def coverage(intervals: Sequence[tuple[int, int]], length: int, *, fresh: bool) -> Coverage:
    """
    >>> found = coverage([(0, 4), (2, 6)], 8, fresh=True)
    >>> [(s.start, s.stop, s.fresh) for s in found.stretches[1]]
    [(2, 4, False), (4, 6, True)]
    >>> found.untouched
    ((6, 8),)
    """
    if not fresh:
        return Coverage(tuple((Stretch(a, b, False),) for a, b in intervals), ())
    untouched = [(0, length)]
    stretches = []
    for start, stop in intervals:
        new = [(max(a, start), min(b, stop)) for a, b in untouched if a < stop and start < b]
        stretches.append(_alternating(start, stop, new))
        untouched = [
            part
            for a, b in untouched
            for part in ((a, min(b, start)), (max(a, stop), b))
            if part[0] < part[1]
        ]
    return Coverage(tuple(stretches), tuple(untouched))


def _alternating(start: int, stop: int, new: list[tuple[int, int]]) -> tuple[Stretch, ...]:
    """`start..stop` cut into what is new and what is not."""
    result = []
    at = start
    for a, b in new:
        if at < a:
            result.append(Stretch(at, a, False))
        result.append(Stretch(a, b, True))
        at = b
    if at < stop:
        result.append(Stretch(at, stop, False))
    return tuple(result)
