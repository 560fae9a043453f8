"""What a campaign is: cases by number, each of which comes to counts, and to sentences where
something is wrong."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time
from typing import Protocol

__all__ = ["Campaign", "Hang", "Tally", "Verdict", "within"]


@dataclass(frozen=True)
class Verdict:
    """What became of a case; `wrong` is empty where all is as promised."""

    counts: Counter[str]
    wrong: tuple[str, ...] = ()


class Campaign(Protocol):
    """`case` draws by the seed and the number alone, so each can be repeated by itself."""

    def case(self, number: int) -> Verdict: ...

    def close(self) -> None: ...


@dataclass
class Tally:
    """The sum of many verdicts."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, number: int, verdict: Verdict, seconds: float) -> None:
        self.cases += 1
        self.counts += verdict.counts
        self.wrong += [f"case {number}: {what}" for what in verdict.wrong]
        self.seconds += seconds


class Hang(BaseException):
    """No `Exception`, so that what is tried cannot catch it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `Hang` in the block after so many seconds of this process, or ten times as many of the
    clock: a busy machine is no hang. In the main thread only."""

    def end(*_: object) -> None:
        raise Hang(f"still running after {process_time() - begun:.0f} s of its own")

    begun = process_time()
    timers = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 10))
    before = [signal.signal(number, end) for number, _, _ in timers]
    for _, timer, times in timers:
        signal.setitimer(timer, times * seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
