"""The compute lane and its marks: where on it a communication may begin.

On the CPU computation is done when its call returns, so there is nothing to mark. On CUDA a mark is
an event on the compute stream, and a communication waits for the marks it depends on, and for no
other computation: that is what lets it overlap.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Lanes"]


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: dict[int, torch.cuda.Event] = {}
        self._begin = self._record() if self._cuda else None

    def mark(self, at: int) -> None:
        if self._cuda:
            self._events[at] = self._record()

    def after(self, computations: Iterable[int]) -> tuple[torch.cuda.Event, ...]:
        """What a communication that depends on these computations must wait for."""
        if self._begin is None:
            return ()
        return (self._begin, *(self._events[i] for i in computations))

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
