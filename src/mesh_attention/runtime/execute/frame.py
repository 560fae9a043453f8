"""`Frame`: all of an executor but its attentions. Executors of a program for several masks share a
frame: buffers, dependencies, transfers and merges depend on no mask, and are bound to memory once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import RowChoice
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Pass
from mesh_attention.plan.language.program import (
    Attention,
    Communication,
    Free,
    Operation,
    Program,
)
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.language.workspace import dependencies, lifetimes, workspace_map
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify.order import order_fault
from mesh_attention.runtime.device import ComputeStreams, Marks, Workspace, WorkspaceBlock
from mesh_attention.runtime.execute.binding import Bindings, CallShape, Views, Work
from mesh_attention.runtime.transport.interface import Started, Transport


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
    """A program on one rank: its memory, streams and steps, and the bindings of its transfers and
    merges. `row_choice`: of the kernels that merge rows."""

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
        self.bindings = Bindings(program, problem, memory, call_shape, transport, row_choice.rows)
        self.steps = tuple(self._steps(pass_, transport))
        self.workspace_bytes = memory.total_bytes * call_shape.batch
        kept = [b.num_bytes(problem) for b in program.buffers if b.role is Role.KEPT]
        self.kept_bytes = sum(kept) * call_shape.batch

    def _steps(self, pass_: Pass, transport: Transport) -> Iterator[ProgramStep]:
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
                if transport.in_order and at not in poisoned:
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

    def bind(self, block: WorkspaceBlock) -> tuple[Views, list[Work | None]]:
        """Binds operations to a block of workspace once; None: an attention, or an operation on the
        caller's tensors."""
        if self not in block.bound:
            views = self.bindings.workspace(block.memory)
            works = [
                self.bindings.work(step.op, views)
                if step.fixed and not isinstance(step.op, Attention)
                else None
                for step in self.steps
            ]
            block.bound[self] = views, works
        bound: tuple[Views, list[Work | None]] = block.bound[self]
        return bound
