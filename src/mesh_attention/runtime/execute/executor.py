"""The executor: runs one rank's compiled program of one pass, and decides nothing.

`make_executor` (`runtime/session/prepare.py`) makes it, `PreparedCall` runs it. Communication is
started in program order and waited for only by the operations that need it. Operations on workspace
buffers are bound to their tensors once, operations on the caller's tensors in every call:
`Bindings` binds transfers and merges, `Attentions` binds attentions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels import Choice, MaskKind
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import Attention, Operation
from mesh_attention.runtime.device import PassMemory, WorkspaceBlock
from mesh_attention.runtime.execute.attentions import Attentions
from mesh_attention.runtime.execute.binding import CallShape, Views, Work
from mesh_attention.runtime.execute.call_masks import KnownRanges
from mesh_attention.runtime.execute.frame import Frame, ProgramStep
from mesh_attention.runtime.execute.memory import mask_bytes, scratch_bytes
from mesh_attention.runtime.transport.interface import Counters, Handle

__all__ = ["CallShape", "Executor", "Trace", "nvtx_span", "run_to_end"]

Trace = Callable[[Operation], AbstractContextManager[Any]]  # entered around each operation


class Executor:
    """One rank's compiled program of one pass, ready to be run many times. `choices` of kernels and
    `call_summary` are for reports: why these kernels, and how they are called."""

    def __init__(
        self,
        frame: Frame,
        attentions: Attentions,
        choices: Mapping[MaskKind, Choice],
        call_summary: str,
        trace: Trace | None = None,
    ) -> None:
        self.frame, self.attentions, self._trace = frame, attentions, trace
        self.choices, self.call_summary = choices, call_summary
        self.call_shape, self.workspace_bytes = frame.call_shape, frame.workspace_bytes
        scratch = scratch_bytes(
            frame.program, frame.problem, attentions.kernels, two_streams=frame.two_streams
        )
        self.scratch_bytes = scratch * self.call_shape.batch
        self.counters = Counters()

    @property
    def memory(self) -> PassMemory:
        masks = mask_bytes(chain(*self.attentions.masks.values()), self.call_shape.device)
        return PassMemory(self.workspace_bytes, self.scratch_bytes, masks, self.frame.kept_bytes)

    def for_mask(self, plan: Plan, known_ranges: KnownRanges, *, by_mask: bool = False) -> Executor:
        """An executor for a plan that differs in its mask alone, if all calls of the program take
        row ranges. It shares all but the attentions: see `Attentions.for_mask`."""
        other = copy(self)
        other.attentions = self.attentions.for_mask(plan, known_ranges, by_mask=by_mask)
        return other

    def run(self, inputs: Mapping[str, Tensor]) -> Generator[None, None, dict[str, Tensor]]:
        """Yields where it waits for another rank of this process, so one thread can run all ranks
        in turns. Inputs and outputs are (rows, batch, heads, width), contiguous."""
        frame = self.frame
        block = frame.workspace.take(self.workspace_bytes, self.call_shape.device)
        bound, works = block.bound.get(self) or self._bind(block)
        views, outputs = frame.bindings.call(bound, inputs)
        streams = frame.streams
        in_flight: dict[int, Handle] = {}
        with ExitStack() as stack:
            if streams is not None:
                stack.enter_context(block.in_use())
            if frame.workspace.poisons:  # before `streams` mark the begin, which transfers wait for
                frame.workspace.poison(block.memory, outputs.values())
            if streams is not None:
                stack.enter_context(streams)
            for step, work in zip(frame.steps, works, strict=True):
                for before in step.waits:
                    handle = in_flight.pop(before, None)
                    if handle is not None and streams is None and handle.ready:
                        handle.wait()
                    elif handle is not None:
                        yield from self._wait(handle)
                for name in step.poisoned:
                    views.workspace[name].fill_(torch.nan)
                if work is None:
                    work = self._work(step, views)
                if step.started is not None:
                    self.counters.starts[step.started] += self.call_shape.batch
                    in_flight[step.at] = work(step.after)
                else:
                    work()
                if step.marked and streams is not None:
                    streams.mark(step.at)
            for last in in_flight.values():
                yield from self._wait(last)
        return outputs

    def _wait(self, handle: Handle) -> Generator[None, None, None]:
        """Lets the compute streams wait for a communication."""
        streams = self.frame.streams
        while not handle.ready:
            if streams is not None:
                streams.pause()
            yield
            if streams is not None:
                streams.resume()
        if streams is None:
            handle.wait()
        else:
            streams.wait(handle.wait)

    def _work(self, step: ProgramStep, views: Views, work: Work | None = None) -> Work:
        """The operation, bound to its tensors and traced. `work`: already bound by the frame."""
        if isinstance(step.op, Attention):
            work = self.attentions.bind(step.at, views)
        elif work is None:
            work = self.frame.bindings.work(step.op, views)
        return work if self._trace is None else partial(_traced, self._trace, step.op, work)

    def _bind(self, block: WorkspaceBlock) -> tuple[Views, list[Work | None]]:
        """Binds the operations on a block of workspace; None: bound in each call."""
        views, shared = self.frame.bind(block)
        works = [
            self._work(step, views, work) if step.fixed else None
            for step, work in zip(self.frame.steps, shared, strict=True)
        ]
        block.bound[self] = views, works
        return views, works


def _traced(trace: Trace, op: Operation, work: Callable[..., Any], *arguments: Any) -> Any:
    with trace(op):
        return work(*arguments)


def nvtx_span(op: Operation) -> AbstractContextManager[None]:
    """A `Trace` for profilers: every operation is an NVTX range with the operation's name."""
    span: AbstractContextManager[None] = torch.cuda.nvtx.range(op.name)
    return span


def run_to_end(execution: Generator[None, None, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Runs a program whose transport never waits for a rank of the same process."""
    while True:
        try:
            next(execution)
        except StopIteration as end:
            result: dict[str, Tensor] = end.value
            return result
