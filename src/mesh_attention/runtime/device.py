"""The compute streams and the workspace of one rank; executors use them, transports wait for marks.

**Streams** exist on GPUs only: on the CPU computation is done when its call returns. A mark is an
event on a compute stream. A communication waits for the marks it depends on, and for no other
computation: that is what lets it overlap. Events are made once and recorded in every call. Kernel
calls may take turns on two streams, because the last programs of a call leave most of the GPU idle,
and merging its result leaves the matrix units idle: the next call fills both. All else stays in
program order. The rule is one line: what comes after a kernel call waits for all that came before
it, so a call runs beside the one before it and beside nothing else.

**The workspace** is one block of memory per device, at whose planned offsets all buffers lie. It is
kept between calls and grows to the largest call. What executors have bound to a block (views of its
buffers) is kept with it and ends with it. With `poison` every byte is set so that anything read
before it was written turns the result into NaN; tests run that way. On a CPU each buffer is set
again when it is first used, since other buffers may have lain there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Marks = tuple[torch.cuda.Event, ...]


class ComputeStreams:
    """`two`: kernel calls take turns. Only where communications run on a stream of their own."""

    _main: torch.cuda.Stream  # that on which a call began
    _stream: torch.cuda.Stream  # the current one of the two

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._begin = _event()
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
        """Go to the other stream for the next kernel call.

        Tensors held for calls that are over are dropped. Their memory belongs to the stream that
        made them, and is used again only by calls that wait for those."""
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
        """Let both streams wait for what `wait` makes the current stream wait for.

        The stream of the next kernel call waits first, and the other stream waits for that one. If
        both waited by themselves, the call after the next could begin first and hold the
        multiprocessors that the next call should have: that cost up to 2 of 30 ms now and then."""
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
        """The marks of these computations, and of the call's begin, for a communication that
        depends on them. The same events serve every call."""
        marks = [self._events.setdefault(i, _event()) for i in computations]
        return (self._begin, *marks) if begin else tuple(marks)


def transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority, as NCCL's own are in `runtime/transport/groups.py`."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    fields = {"stream_id": stream_id, "device_index": device_index, "device_type": device_type}
    return torch.cuda.Stream(**fields)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`, which makes a new object each time and takes several us."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all programs of a process: the allocator keeps memory apart by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_ALL_ONES = 0xFF  # every floating-point type reads this as NaN


@dataclass(eq=False, slots=True)
class WorkspaceBlock:
    memory: Tensor
    # By whoever bound it, for as long as that lives.
    bound: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    _last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a call on a GPU. Calls share the memory, so one on another CUDA stream follows the
        one before it. Those of one stream do so by themselves, and so does what a graph captures.
        """
        if not self.memory.is_cuda or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])
        try:
            yield
        finally:
            event = torch.cuda.Event() if self._last is None else self._last[1]  # type: ignore[no-untyped-call]
            event.record(stream)
            self._last = stream, event


class Workspace:
    def __init__(self, *, poison: bool = False) -> None:
        self._blocks: dict[torch.device, WorkspaceBlock] = {}
        self._adopted: set[torch.device] = set()
        self.poisons = poison

    def take(self, num_bytes: int, device: torch.device) -> WorkspaceBlock:
        block = self._blocks.get(device)
        if block is None or block.memory.numel() < num_bytes:
            assert device not in self._adopted, "others read what we would write elsewhere"
            # Give the old block back, views and all, before asking for a larger one.
            self._blocks.pop(device, None)
            del block
            block = WorkspaceBlock(torch.empty(num_bytes, dtype=torch.uint8, device=device))
            self._blocks[device] = block
        return block

    def adopt(self, memory: Tensor) -> None:
        """Use this block from now on, because others made it (and must be able to read it)."""
        self._blocks[memory.device] = WorkspaceBlock(memory)
        self._adopted.add(memory.device)

    def poison(self, memory: Tensor, outputs: Iterable[Tensor]) -> None:
        memory.fill_(_ALL_ONES)
        for output in outputs:
            output.fill_(torch.nan)

    def release(self) -> None:
        self._blocks.clear()
        self._adopted.clear()


@dataclass(frozen=True)
class PassMemory:
    """Bytes on the device that a pass of this rank takes, besides the caller's tensors."""

    workspace_bytes: int  # one for all passes and calls, as large as the largest needs it
    kernel_bytes: int  # at most, while a kernel call runs: its results, and its library's own
    mask_bytes: int = 0  # tables of the masks, which both passes may share, as far as they are made
    kept_bytes: int = 0  # rows that a forward pass leaves to the backward pass, of all layers

    @property
    def total_bytes(self) -> int:
        return self.workspace_bytes + self.kernel_bytes + self.mask_bytes + self.kept_bytes
