"""The compute streams of a rank on a GPU, and marks on them: where a communication may begin.

A mark is an event on a compute stream. A communication waits for the marks it depends on, and for
no other computation: that is what lets it overlap. Events are made once and recorded in every call.
On the CPU computation is done when its call returns, so executors there have no such object.

Kernel calls may take turns on two streams, because the last programs of a call leave most of the
GPU idle, and merging its result leaves the matrix units idle: the next call fills both. All else
stays in program order. The rule is one line: what comes after a kernel call waits for all that came
before it, so a call runs beside the one before it and beside nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch

Marks = tuple[torch.cuda.Event, ...]


class ComputeStreams:
    """`two`: kernel calls take turns. Only where communications run on a stream of their own."""

    _main: torch.cuda.Stream  # that on which a call began
    _stream: torch.cuda.Stream  # the current one of the two

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._begin = _event()
        self.two = two
        self._side = _side_stream(device) if two else None
        self._ends = [_event(), _event()]
        self._passed = _event()
        self._turn = 0
        self._held: list[tuple[int, object]] = []

    def __enter__(self) -> None:
        """A new call begins here, on the stream that is now the current one."""
        self._main = self._stream = torch.cuda.current_stream(self._device)
        self._begin.record(self._main)
        if self._side is not None:
            self._side.wait_event(self._begin)
            self._turn = 0

    def turn(self) -> None:
        """A kernel call comes: go to the other stream, where what was before the last call is done.

        What was held for calls that are over is dropped; its memory belongs to the stream that made
        it, and is given out again only to calls that wait for those."""
        assert self._side is not None
        self._ends[self._turn % 2].record(self._stream)
        self._turn += 1
        self._stream = self._side if self._turn % 2 else self._main
        torch.cuda.set_stream(self._stream)
        if self._held:
            self._held = [held for held in self._held if held[0] + 2 > self._turn]

    def follow(self) -> None:
        """What comes now waits for all that came before the last turn."""
        self._stream.wait_event(self._ends[(self._turn + 1) % 2])

    def hold(self, *things: object) -> None:
        """Keep tensors that calls on both streams read until those calls are over."""
        self._held.append((self._turn, things))

    def record(self, event: torch.cuda.Event) -> None:
        """Record an event on the current stream."""
        event.record(self._stream)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """What comes now waits for an event of the other stream."""
        self._stream.wait_event(event)

    def wait(self, wait: Callable[[], None]) -> None:
        """What comes now on either stream needs something that `wait` makes the current one wait
        for: that of the next kernel call, and the other stream waits for that one. If both waited
        by themselves, the call after the next could be the first to begin, and hold the
        multiprocessors that the next was to have: up to 2 of 30 ms were lost so, now and then."""
        if self._side is None:
            wait()
            return
        last = self._stream
        other = self._main if last is self._side else self._side
        torch.cuda.set_stream(other)
        wait()
        self._passed.record(other)
        last.wait_event(self._passed)
        torch.cuda.set_stream(last)

    def pause(self) -> None:
        """Others use the device meanwhile, on the stream that was the current one."""
        if self._side is not None:
            torch.cuda.set_stream(self._main)

    def resume(self) -> None:
        if self._side is not None:
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        """Both streams are done: the call goes on where it began."""
        if self._side is None:
            return
        self._ends[1].record(self._side)
        self._main.wait_event(self._ends[1])
        self._stream = self._main
        torch.cuda.set_stream(self._main)
        self._held.clear()

    def mark(self, at: int) -> None:
        self._events[at].record(self._stream)

    def after(self, computations: Iterable[int], *, begin: bool) -> Marks:
        """What a communication that depends on these computations, and on the call's begin, must
        wait for. The same events serve every call."""
        marks = [self._events.setdefault(i, _event()) for i in computations]
        return (self._begin, *marks) if begin else tuple(marks)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all programs of a process: the allocator keeps memory apart by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
