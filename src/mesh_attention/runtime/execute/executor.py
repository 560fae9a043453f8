"""The executor: interprets one rank's program, and nothing else.

`run` is a generator that yields while it has to wait for ranks of the same process, so one loop
serves all ranks in one process and one rank of many. Communication is started in program order and
waited for only by the operations that need it. Operations on workspace buffers are bound to their
tensors once; only those that touch the caller's tensors are bound again in a warm call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels import BlockMask, BlockSize, Choice, Kernel, MaskKind, RowChoice
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import Attention, Operation, Program
from mesh_attention.runtime.device import PassMemory, WorkspaceBlock
from mesh_attention.runtime.execute.attentions import Attentions, Scores
from mesh_attention.runtime.execute.binding import CallShape, Views
from mesh_attention.runtime.execute.call_masks import KnownRanges, masks_of
from mesh_attention.runtime.execute.frame import Frame, Work
from mesh_attention.runtime.execute.memory import (
    call_size,
    mask_bytes,
    scratch_bytes,
    stand_in_block,
)
from mesh_attention.runtime.execute.steps import ProgramStep
from mesh_attention.runtime.transport.interface import Counters, Handle

__all__ = ["CallShape", "Executor", "Trace", "nvtx_span", "run_to_end"]

Trace = Callable[[Operation], AbstractContextManager[Any]]  # is entered around each operation


class Executor:
    """One rank's compiled program of one pass, ready to be run many times."""

    def __init__(
        self,
        plan: Plan,
        frame: Frame,
        kernels: Mapping[str, Kernel],
        scores: Scores,
        *,
        deterministic: bool,
        mask_device: torch.device,
        known_ranges: KnownRanges,
        leaving: Callable[[Plan], Program] | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`kernels` by the names that calls have. `known_ranges`: masks made so far, by the pass
        that came before. `leaving`: the program with calls that leave SMs to transfers as the mask
        of a plan wants. `make_executor` (`runtime/session/prepare.py`) finds all of this."""
        self.call_shape, self.program = frame.call_shape, frame.program
        self._frame, self._trace = frame, trace
        self._problem, self._kernels = plan.problem, kernels
        self._masks_for = partial(masks_of, program=self.program, device=mask_device)
        self._leaving = leaving
        masks = self._masks_for(plan, known=known_ranges)
        self._attentions = Attentions(frame, masks, kernels, scores, deterministic=deterministic)
        scratch = scratch_bytes(self.program, plan.problem, kernels, two_streams=frame.two_streams)
        self.workspace_bytes = frame.workspace_bytes
        self.scratch_bytes = scratch * self.call_shape.batch
        self.counters = Counters()
        # Why these kernels, for people; and what was predicted of the calls.
        self.choices: dict[MaskKind, Choice] = {}
        self.row_choice: RowChoice | None = None
        self.calls = ""

    @property
    def memory(self) -> PassMemory:
        masks = [mask for of_calls in self._attentions.masks.values() for mask in of_calls]
        held = mask_bytes(masks, self.call_shape.device)
        return PassMemory(self.workspace_bytes, self.scratch_bytes, held, self._frame.kept_bytes)

    def for_mask(self, plan: Plan, known_ranges: KnownRanges, *, by_mask: bool = False) -> Executor:
        """The same program for a plan that differs in its mask alone, where all calls go by row
        ranges. What was made ready or bound for this executor serves the other, but for attention.
        `by_mask`: calls leave SMs to transfers as this mask wants."""
        other = copy(self)
        if by_mask and self._leaving is not None:
            other.program = self._leaving(plan)
        masks = self._masks_for(plan, known=known_ranges)
        other._attentions = self._attentions.with_masks(masks, other.program.operations)
        return other

    def prepare_kernels(self) -> None:
        """Let kernels make of masks what they can make ahead of a call."""
        table = self.program.buffer_table()
        done: set[tuple[BlockMask, BlockSize]] = set()  # slices of heads are alike
        for at, masks in self._attentions.masks.items():
            op = self.program.operations[at]
            assert isinstance(op, Attention)
            for call, mask in zip(op.calls, masks, strict=True):
                prepare = getattr(self._kernels[call.kernel], "prepare", None)
                if prepare is None:
                    continue
                size = call_size(self._problem, table, op, call)
                if (mask, size) not in done:
                    done.add((mask, size))
                    prepare(self._frame.direction, stand_in_block(self.call_shape, size, mask))

    def run(self, inputs: Mapping[str, Tensor]) -> Generator[None, None, dict[str, Tensor]]:
        """Inputs are (rows, batch, heads, width), contiguous; so are the outputs."""
        frame = self._frame
        block = frame.workspace.take(self.workspace_bytes, self.call_shape.device)
        bound, works = block.bound.get(self) or self._bind(block)
        views, outputs = frame.bindings.call(bound, inputs)
        streams = frame.streams
        in_flight: dict[int, Handle] = {}
        with ExitStack() as stack:
            stack.enter_context(block.in_use())
            if frame.workspace.poisons:  # before the call begins: communications wait for that
                frame.workspace.poison(block.memory, outputs.values())
            if streams is not None:
                stack.enter_context(streams)
            for step, work in zip(frame.steps, works, strict=True):
                for before in step.waits:
                    if before in in_flight:
                        yield from self._wait(in_flight.pop(before))
                for name in step.poisoned:
                    views.workspace[name].fill_(torch.nan)
                if work is None:
                    work = self._work(step, views)
                if step.communicates:
                    self.counters.starts[frame.starts[step.at]] += self.call_shape.batch
                    in_flight[step.at] = work(step.after)
                else:
                    work()
                if step.marked and streams is not None:
                    streams.mark(step.at)
            for handle in in_flight.values():
                yield from self._wait(handle)
        return outputs

    def _wait(self, handle: Handle) -> Generator[None, None, None]:
        """What comes now on either stream needs a communication."""
        streams = self._frame.streams
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

    def _work(self, step: ProgramStep, views: Views, shared: Work | None = None) -> Work:
        """The operation on its tensors. `shared`: as the frame has bound it."""
        work = shared
        if work is None:
            attends = isinstance(step.op, Attention)
            work = (
                self._attentions.bind(step.at, views) if attends else self._frame.work(step, views)
            )
        return work if self._trace is None else partial(_traced, self._trace, step.op, work)

    def _bind(self, block: WorkspaceBlock) -> tuple[Views, list[Work | None]]:
        """Everything that can be done once for a block of workspace."""
        views, shared = self._frame.bind(block)
        works = [
            self._work(step, views, work) if step.fixed else None
            for step, work in zip(self._frame.steps, shared, strict=True)
        ]
        block.bound[self] = views, works
        return views, works


def _traced(trace: Trace, op: Operation, work: Callable[..., Any], *arguments: Any) -> Any:
    with trace(op):
        return work(*arguments)


def nvtx_span(op: Operation) -> AbstractContextManager[None]:
    """A `Trace` for profilers: every operation is a range under its own name."""
    span: AbstractContextManager[None] = torch.cuda.nvtx.range(op.name)
    return span


def run_to_end(execution: Generator[None, None, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Run an execution whose transport never makes it wait for its own process."""
    while True:
        try:
            next(execution)
        except StopIteration as end:
            result: dict[str, Tensor] = end.value
            return result
