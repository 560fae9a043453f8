"""The compute lane and its marks: where on it a communication may begin.

On the CPU computation is done when its call returns, so there is nothing to mark. On CUDA a mark is
an event on the compute stream, and a communication waits for the marks it depends on, and for no
other computation: that is what lets it overlap. Events are made once and recorded in every call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Lanes", "Marks"]

Marks = tuple[torch.cuda.Event, ...]


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._events: dict[int, torch.cuda.Event] = {}
        self._begin = self._event() if self._cuda else None
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """A new call begins here, on the stream that is now the current one."""
        if self._begin is not None:
            self._stream = torch.cuda.current_stream(self._device)
            self._begin.record(self._stream)

    def mark(self, at: int) -> None:
        if self._stream is not None:
            self._events[at].record(self._stream)

    def after(self, computations: Iterable[int], *, begin: bool) -> Marks:
        """What a communication that depends on these computations, and on the call's begin, must
        wait for. The same events serve every call."""
        if self._begin is None:
            return ()
        marks = [self._events.setdefault(i, self._event()) for i in computations]
        return (self._begin, *marks) if begin else tuple(marks)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
