"""The executor: interprets one rank's program, and nothing else.

`run` is a generator that yields while it has to wait for ranks of the same process, so the same
loop serves all ranks in one process and one rank of many processes. Communication is started in
program order and waited for only by the operations that need it.

A warm call decides nothing: operations on workspace buffers were bound to their tensors when the
workspace was taken, and only those that touch the caller's tensors are bound again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import (
    BlockMask,
    BlockSize,
    Choice,
    Kernel,
    MaskKind,
    RowChoice,
    RowKernels,
)
from mesh_attention.plan.language.buffers import Piece, Role
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attention, Communication, Operation, Program
from mesh_attention.plan.language.workspace import dependencies, lifetimes, workspace_map
from mesh_attention.plan.read.verify.order import order_fault
from mesh_attention.runtime.device import ComputeStreams, PassMemory, Workspace, WorkspaceBlock
from mesh_attention.runtime.execute.binding import Bindings, CallShape, Views
from mesh_attention.runtime.execute.call_masks import KnownRanges, masks_of
from mesh_attention.runtime.execute.compute import ComputeOperations, Scores
from mesh_attention.runtime.execute.memory import (
    call_size,
    mask_bytes,
    scratch_bytes,
    stand_in_block,
)
from mesh_attention.runtime.execute.steps import ProgramStep, program_steps
from mesh_attention.runtime.transport.interface import Counters, Handle, Transport, started

__all__ = ["CallShape", "Executor", "Trace", "nvtx_span", "run_to_end"]

Trace = Callable[[Operation], AbstractContextManager[Any]]  # is entered around each operation


class Executor:
    """One rank's compiled program of one pass, ready to be run many times."""

    def __init__(
        self,
        plan: Plan,
        pass_: Pass,
        program: Program,
        kernels: Mapping[str, Kernel],
        transport: Transport,
        workspace: Workspace,
        call_shape: CallShape,
        scores: Scores,
        *,
        rows: RowKernels,
        deterministic: bool,
        two_streams: bool,
        mask_device: torch.device,
        known_ranges: KnownRanges,
        trace: Trace | None = None,
    ) -> None:
        """`kernels` by the names that calls have. `known_ranges`: masks made so far, by the pass
        that came before. `make_executor` (`runtime/session/prepare.py`) finds all of this."""
        fault = order_fault(program)
        if fault is not None:
            raise MeshAttentionError(
                f"the {pass_.direction} program of rank {program.rank} cannot run: {fault}; "
                "`mesh-attention verify` and verify(plan) look at all ranks"
            )
        self.call_shape = call_shape
        self.program = program
        self._transport, self._workspace, self._trace = transport, workspace, trace
        self._problem, self._direction, self._kernels = plan.problem, pass_.direction, kernels
        self._base: Executor | None = None
        memory = workspace_map(program, plan.problem)
        on_cuda = call_shape.device.type == "cuda"
        two_streams = two_streams and on_cuda
        self._streams = ComputeStreams(call_shape.device, two=two_streams) if on_cuda else None
        self._bindings = Bindings(program, plan.problem, memory, call_shape)
        poisoned: dict[int, tuple[str, ...]] = defaultdict(tuple)
        if workspace.poisons and call_shape.device.type == "cpu":
            for name, (born, _) in lifetimes(program).items():
                poisoned[born] += (name,)
        self._steps = program_steps(
            program.operations,
            dependencies(program, memory),
            self._streams,
            self._bindings,
            poisoned,
            in_order=transport.in_order,
        )
        self._masks_for = partial(masks_of, program=program, device=mask_device)
        self._compute = ComputeOperations(
            program,
            memory,
            self._masks_for(plan, known=known_ranges),
            kernels,
            rows,
            scores,
            self._streams if two_streams else None,
            deterministic=deterministic,
        )
        scratch = scratch_bytes(program, plan.problem, kernels, two_streams=two_streams)
        self.workspace_bytes = memory.total_bytes * call_shape.batch
        self.scratch_bytes = scratch * call_shape.batch
        kept = [b.num_bytes(plan.problem) for b in program.buffers if b.role is Role.KEPT]
        self.kept_bytes = sum(kept) * call_shape.batch
        table, batch = program.buffer_table(), call_shape.batch

        def num_bytes(piece: Piece) -> int:
            buffer = table[piece.buffer]
            heads, row_bytes = piece.num_heads(buffer), buffer.row_bytes(plan.problem)
            return piece.num_rows * batch * heads * row_bytes

        self.counters = Counters()
        self._starts = {
            at: started(op, pass_.groups[op.group], program.rank, table, num_bytes)
            for at, op in enumerate(program.operations)
            if isinstance(op, Communication)
        }
        # Why these kernels, for people; and what was predicted of the calls.
        self.choices: dict[MaskKind, Choice] = {}
        self.row_choice: RowChoice | None = None
        self.calls = ""

    @property
    def memory(self) -> PassMemory:
        masks = [mask for of_calls in self._compute.masks.values() for mask in of_calls]
        held = mask_bytes(masks, self.call_shape.device)
        return PassMemory(self.workspace_bytes, self.scratch_bytes, held, self.kept_bytes)

    def for_mask(self, plan: Plan, known_ranges: KnownRanges) -> Executor:
        """The same program for a plan that differs in its mask alone, where all calls go by row
        ranges. What was made ready or bound for this executor serves the other, but for attention.
        """
        other = copy(self)
        other._base = self
        other._compute = self._compute.with_masks(self._masks_for(plan, known=known_ranges))
        return other

    def prepare_kernels(self) -> None:
        """Let kernels make of masks what they can make ahead of a call."""
        table = self.program.buffer_table()
        done: set[tuple[BlockMask, BlockSize]] = set()  # slices of heads are alike
        for at, masks in self._compute.masks.items():
            op = self.program.operations[at]
            assert isinstance(op, Attention)
            for call, mask in zip(op.calls, masks, strict=True):
                prepare = getattr(self._kernels[call.kernel], "prepare", None)
                if prepare is None:
                    continue
                size = call_size(self._problem, table, op, call)
                if (mask, size) not in done:
                    done.add((mask, size))
                    prepare(self._direction, stand_in_block(self.call_shape, size, mask))

    def run(self, inputs: Mapping[str, Tensor]) -> Generator[None, None, dict[str, Tensor]]:
        """Inputs are (rows, batch, heads, width), contiguous; so are the outputs."""
        block = self._workspace.take(self.workspace_bytes, self.call_shape.device)
        bound, works = block.bound.get(self) or self._bind(block)
        views, outputs = self._bindings.call(bound, inputs)
        streams = self._streams
        in_flight: dict[int, Handle] = {}
        with ExitStack() as stack:
            stack.enter_context(block.in_use())
            if self._workspace.poisons:  # before the call begins: communications wait for that
                self._workspace.poison(block.memory, outputs.values())
            if streams is not None:
                stack.enter_context(streams)
            for step, work in zip(self._steps, works, strict=True):
                for before in step.waits:
                    if before in in_flight:
                        yield from self._wait(in_flight.pop(before))
                for name in step.poisoned:
                    views.workspace[name].fill_(torch.nan)
                if work is None:
                    work = self._work(step, views)
                if step.communicates:
                    self.counters.starts[self._starts[step.at]] += 1
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
        streams = self._streams
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

    def _work(self, step: ProgramStep, views: Views) -> Callable[..., Any]:
        """The operation on its tensors: computations take nothing, communications their marks."""
        if isinstance(step.op, Communication):
            work: Callable[..., Any] = self._transport.prepare(step.op, views.rows)
        else:
            work = self._compute.bind(step.at, views)
        return work if self._trace is None else partial(_traced, self._trace, step.op, work)

    def _bind(self, block: WorkspaceBlock) -> tuple[Views, list[Callable[..., Any] | None]]:
        """Everything that can be done once for a block of workspace."""
        base = self._base
        if base is None:
            views = self._bindings.workspace(block.memory)
            works = [self._work(step, views) if step.fixed else None for step in self._steps]
        else:
            views, known = block.bound.get(base) or base._bind(block)
            works = [
                self._work(step, views) if step.fixed and isinstance(step.op, Attention) else work
                for step, work in zip(self._steps, known, strict=True)
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
