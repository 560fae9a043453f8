"""`Frame`: all of an executor but its attentions. Executors of a program for several masks share a
frame: buffers, dependencies, transfers and merges depend on no mask, and are bound to memory once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import RowChoice, RowKernels
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.language.program import (
    Attention,
    Communication,
    Free,
    Merge,
    MergeRule,
    Operation,
    Program,
)
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.language.workspace import dependencies, lifetimes, workspace_map
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify.order import order_fault
from mesh_attention.runtime.device import ComputeStreams, Marks, Workspace, WorkspaceBlock
from mesh_attention.runtime.execute.binding import GRAD_LSE, Bindings, CallShape, Views
from mesh_attention.runtime.transport.interface import Started, Transport

Work = Callable[..., Any]  # a bound operation: a communication takes its marks, others nothing


class ProgramStep(NamedTuple):
    at: int  # the place of the operation in the program
    op: Operation
    started: Started | None  # what a communication counts when it begins; None: a computation
    waits: tuple[int, ...]  # places of communications that must be over before
    after: Marks  # of the compute stream, for which a communication waits
    marked: bool  # a communication waits for this computation
    fixed: bool  # touches nothing of the caller's, and so is bound once
    poisoned: tuple[str, ...]  # buffers to be poisoned before, since it is the first to use them


class Frame:
    """A program on one rank: its memory, streams and steps, and its transfers and merges, bound to
    tensors. `row_choice`: of the kernels that merge rows."""

    def __init__(
        self,
        program: Program,
        pass_: Pass,
        problem: Problem,
        transport: Transport,
        workspace: Workspace,
        call_shape: CallShape,
        row_choice: RowChoice,
        *,
        two_streams: bool,
    ) -> None:
        fault = order_fault(program)
        if fault is not None:
            raise MeshAttentionError(
                f"the {pass_.direction} program of rank {program.rank} cannot run: {fault}; "
                "`mesh-attention verify` and verify(plan) look at all ranks"
            )
        self.program, self.direction, self.problem = program, pass_.direction, problem
        self.call_shape, self.workspace, self.row_choice = call_shape, workspace, row_choice
        self.memory = memory = workspace_map(program, problem)
        on_cuda = call_shape.device.type == "cuda"
        self.two_streams = two_streams and on_cuda
        self.streams = ComputeStreams(call_shape.device, two=self.two_streams) if on_cuda else None
        self.bindings = Bindings(program, problem, memory, call_shape)
        self._transport = transport
        self.steps = tuple(self._steps(pass_))
        self.workspace_bytes = memory.total_bytes * call_shape.batch
        kept = [b.num_bytes(problem) for b in program.buffers if b.role is Role.KEPT]
        self.kept_bytes = sum(kept) * call_shape.batch

    def _steps(self, pass_: Pass) -> Iterator[ProgramStep]:
        """In program order. Without `streams` computations are done when they return."""
        program, streams, workspace = self.program, self.streams, self.workspace
        operations, waits = program.operations, dependencies(program, self.memory)
        meter = TrafficMeter(self.problem, program.buffer_table())
        communicates = [isinstance(op, Communication) for op in operations]
        marked = {i for at, before in enumerate(waits) if communicates[at] for i in before}
        poisoned: dict[int, tuple[str, ...]] = defaultdict(tuple)
        if workspace.poisons and streams is None:
            for name, (born, _) in lifetimes(program).items():
                poisoned[born] += (name,)
        first = True  # no communication so far
        for at, op in enumerate(operations):
            if isinstance(op, Free):
                continue  # offsets were planned from it; `dependencies` guards the reuse
            others = tuple([i for i in waits[at] if communicates[i]])
            started: Started | None = None
            after: Marks = ()
            if isinstance(op, Communication):
                members = pass_.groups[op.group]
                traffic = meter.traffic(op, members.index(program.rank), len(members))
                started = type(op).__name__, traffic
                if streams is not None:
                    before = [i for i in waits[at] if not communicates[i]]
                    after = streams.after(before, begin=first)
                    first = False
                if self._transport.in_order and at not in poisoned:
                    others = ()  # it follows them by itself; the compute stream need not wait
            yield ProgramStep(
                at,
                op,
                started,
                others,
                after,
                marked=streams is not None and at in marked and started is None,
                fixed=self.bindings.in_workspace(op),
                poisoned=poisoned.get(at, ()),
            )

    def work(self, step: ProgramStep, views: Views) -> Work:
        """A transfer or a merge on its tensors."""
        if isinstance(step.op, Communication):
            return self._transport.prepare(step.op, views.rows)
        assert isinstance(step.op, Merge), f"{step.op.name} is neither a transfer nor a merge"
        return merge_work(self.row_choice.rows, step.op, views)

    def bind(self, block: WorkspaceBlock) -> tuple[Views, list[Work | None]]:
        """Binds operations to a block of workspace once; None: an attention, or an operation on the
        caller's tensors."""
        if self not in block.bound:
            views = self.bindings.workspace(block.memory)
            works = [
                self.work(step, views)
                if step.fixed and not isinstance(step.op, Attention)
                else None
                for step in self.steps
            ]
            block.bound[self] = views, works
        bound: tuple[Views, list[Work | None]] = block.bound[self]
        return bound


def merge_work(rows: RowKernels, op: Merge, views: Views) -> Work:
    tokens, statistics = views.tokens, views.statistics
    inputs, outputs = op.inputs, op.outputs
    match op.rule:
        case MergeRule.SOFTMAX:
            out, lse = tokens(outputs[0]), statistics(outputs[1])
            if not inputs:
                return partial(_clear, out, lse)
            outs, lses = map(tokens, inputs[::2]), map(statistics, inputs[1::2])
            return partial(rows.merge_all, tuple(outs), tuple(lses), out, lse)
        case MergeRule.LSE:
            if not inputs:
                return partial(statistics(outputs[0]).fill_, -inf)
            return partial(rows.merge_lse, [*map(statistics, inputs)], statistics(outputs[0]))
        case MergeRule.RESCALE:
            out, partial_lse, global_lse = tokens(inputs[0]), *map(statistics, inputs[1:])
            return partial(rows.rescale, out, partial_lse, global_lse, tokens(outputs[0]))
        case MergeRule.SUM:
            total = tokens(outputs[0])
            if not inputs:
                return total.zero_
            return partial(rows.sum, tuple(map(tokens, inputs)), total)
        case MergeRule.DELTA:
            out, grad_out = map(tokens, inputs)
            delta = statistics(outputs[0])
            if GRAD_LSE not in views.passed:
                return partial(rows.delta, out, grad_out, delta)
            grad_lse = statistics(replace(inputs[0], buffer=GRAD_LSE))
            return partial(_delta_less, rows, out, grad_out, grad_lse, delta)


def _clear(out: Tensor, lse: Tensor) -> None:
    """Rows that have seen no key."""
    out.zero_()
    lse.fill_(-inf)


def _delta_less(
    rows: RowKernels, out: Tensor, grad_out: Tensor, grad_lse: Tensor, delta: Tensor
) -> None:
    """Delta less the gradient of lse. In the gradient of a score both are multiplied by the weight
    of the score, with opposite signs."""
    rows.delta(out, grad_out, delta)
    delta.sub_(grad_lse)
