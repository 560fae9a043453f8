"""The compute streams of a rank, and marks on them: where a communication may begin.

On the CPU computation is done when its call returns: there is one stream and nothing to mark. On
CUDA a mark is an event on a compute stream, and a communication waits for the marks it depends on,
and for no other computation: that is what lets it overlap. Events are made once and recorded in
every call.

Kernel calls take turns on two streams, because the last programs of a call leave most of the GPU
idle, and merging its result leaves the matrix units idle: the next call fills both. All else stays
in program order. The rule is one line: what comes after a kernel call waits for all that came
before it, so a call runs beside the one before it and beside nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.program import (
    Attend,
    AttendBackward,
    Communication,
    Operation,
    reads,
    writes,
)
from mesh_attention.plan.language.workspace import WorkspaceMap

Marks = tuple[torch.cuda.Event, ...]


class ComputeStreams:
    """`two`: kernel calls take turns. Only where communications run on a stream of their own."""

    def __init__(self, device: torch.device, *, two: bool = False) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._events: dict[int, torch.cuda.Event] = {}
        self._begin = _event() if self._cuda else None
        self._stream: torch.cuda.Stream | None = None  # the current one of the two
        self._main: torch.cuda.Stream | None = None
        self._side = _side_stream(device) if two and self._cuda else None
        self.two = self._side is not None
        self._ends = [_event(), _event()] if self._side is not None else []
        self._passed = _event() if self._side is not None else None
        self._turn = 0
        self._held: list[tuple[int, object]] = []

    def begin(self) -> None:
        """A new call begins here, on the stream that is now the current one."""
        if self._begin is None:
            return
        self._main = self._stream = torch.cuda.current_stream(self._device)
        self._begin.record(self._main)
        if self._side is not None:
            self._side.wait_event(self._begin)
            self._turn = 0

    def turn(self) -> None:
        """A kernel call comes: go to the other stream, where what was before the last call is done.

        What was held for calls that are over is dropped; its memory belongs to the stream that made
        it, and is given out again only to calls that wait for those."""
        if self._side is None:
            return
        assert self._stream is not None
        assert self._main is not None
        self._ends[self._turn % 2].record(self._stream)
        self._turn += 1
        self._stream = self._side if self._turn % 2 else self._main
        torch.cuda.set_stream(self._stream)
        if self._held:
            self._held = [held for held in self._held if held[0] + 2 > self._turn]

    def follow(self) -> None:
        """What comes now waits for all that came before the last turn."""
        if self._side is not None:
            assert self._stream is not None
            self._stream.wait_event(self._ends[(self._turn + 1) % 2])

    def hold(self, *things: object) -> None:
        """Keep tensors that calls on both streams read until those calls are over."""
        if self._side is not None:
            self._held.append((self._turn, things))

    def record(self, event: torch.cuda.Event) -> None:
        """Record an event on the current stream."""
        if self._stream is not None:
            event.record(self._stream)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """What comes now waits for an event of the other stream."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def wait(self, wait: Callable[[], None]) -> None:
        """What comes now on either stream needs something that `wait` makes the current one wait
        for: that of the next kernel call, and the other stream waits for that one. If both waited
        by themselves, the call after the next could be the first to begin, and hold the
        multiprocessors that the next was to have: up to 2 of 30 ms were lost so, now and then."""
        if self._side is None:
            wait()
            return
        last, passed = self._stream, self._passed
        assert last is not None
        assert passed is not None
        other = self._main if last is self._side else self._side
        assert other is not None
        torch.cuda.set_stream(other)
        wait()
        passed.record(other)
        last.wait_event(passed)
        torch.cuda.set_stream(last)

    def pause(self) -> None:
        """Others use the device meanwhile, on the stream that was the current one."""
        if self._side is not None and self._main is not None:
            torch.cuda.set_stream(self._main)

    def resume(self) -> None:
        if self._side is not None and self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def finish(self) -> None:
        """Both streams are done: the call goes on where it began."""
        if self._side is None or self._main is None:
            return
        self._ends[1].record(self._side)
        self._main.wait_event(self._ends[1])
        self._stream = self._main
        torch.cuda.set_stream(self._main)
        self._held.clear()

    def mark(self, at: int) -> None:
        if self._stream is not None:
            self._events[at].record(self._stream)

    def after(self, computations: Iterable[int], *, begin: bool) -> Marks:
        """What a communication that depends on these computations, and on the call's begin, must
        wait for. The same events serve every call."""
        if self._begin is None:
            return ()
        marks = [self._events.setdefault(i, _event()) for i in computations]
        return (self._begin, *marks) if begin else tuple(marks)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all programs of a process: the allocator keeps memory apart by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def must_follow(operations: Sequence[Operation], memory: WorkspaceMap) -> set[int]:
    """Attentions that may not run beside the kernel call before them, by their place: they read
    what was computed after the last kernel call but one, or write where it is used, and beside the
    last call and its merge it may not be there yet, or still be read."""
    found = set()
    calls = 0
    computed: dict[str, int] = {}  # calls that had begun when a buffer was last computed
    used: dict[str, list[Piece]] = {}  # by computations since the last call
    for at, op in enumerate(operations):
        if isinstance(op, Attend | AttendBackward):
            late = any(computed.get(name, -1) >= calls for name in _kernel_inputs(op))
            if late or any(_shares(one, used, memory) for one in _written_by_kernels(op)):
                found.add(at)
            if op.calls:
                calls += len(op.calls)
                used = {}
        if not isinstance(op, Communication):
            computed.update(dict.fromkeys(op.written, calls))
            for piece in (*reads(op), *writes(op)):
                used.setdefault(piece.buffer, []).append(piece)
    return found


def _written_by_kernels(op: Attend | AttendBackward) -> list[Piece]:
    """What a kernel may write itself, since nothing is there that results are added to."""
    if isinstance(op, Attend):
        return [op.out] if op.fresh else []
    return [op.grad_q] * op.fresh_q + [op.grad_k, op.grad_v] * op.fresh_kv


def _shares(one: Piece, used: Mapping[str, Sequence[Piece]], memory: WorkspaceMap) -> bool:
    """Whether a piece has memory in common with others, given by their buffers."""
    if any(one.overlaps(other) for other in used.get(one.buffer, ())):
        return True
    if one.buffer not in memory.offsets:
        return False
    start = memory.offsets[one.buffer]
    stop = start + memory.sizes[one.buffer]
    return any(
        memory.offsets[name] < stop and start < memory.offsets[name] + memory.sizes[name]
        for name in used
        if name != one.buffer and name in memory.offsets
    )


def _kernel_inputs(op: Attend | AttendBackward) -> Iterator[str]:
    inputs: tuple[Piece | None, ...] = (op.q, op.k, op.v)
    if isinstance(op, AttendBackward):
        inputs += (op.grad_out, op.lse, op.out, op.delta)
    return (piece.buffer for piece in inputs if piece is not None)
