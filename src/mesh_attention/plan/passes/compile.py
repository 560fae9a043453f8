"""All passes in turn: the programs of a plan, compiled for a target when they are asked for.

The runtime, the simulator and the command line call this; the plan that comes in stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mesh_attention.errors import PlanError
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Pass, Plan, Programs
from mesh_attention.plan.language.program import (
    Attend,
    Attention,
    CallKind,
    Communication,
    Free,
    Operation,
    Program,
    SendRecv,
)
from mesh_attention.plan.language.traffic import SharedFlows
from mesh_attention.plan.language.workspace import (
    Alike,
    dependencies,
    without_calls,
    workspace_map,
)
from mesh_attention.plan.passes.choose_calls import CallChooser, CallSummary
from mesh_attention.plan.passes.place import at_offset, placed
from mesh_attention.plan.passes.seconds import CallSeconds, TransferCosts
from mesh_attention.plan.passes.split_calls import leave_sms, split_calls, splits_wanted
from mesh_attention.plan.problem.problem import Problem

Waits = tuple[tuple[int, ...], ...]


def compile_plan(plan: Plan, target: Target) -> Plan:
    """The plan with the programs that run on such a machine."""
    if not isinstance(target, Target):
        raise PlanError(f"{type(target).__name__} is not a Target; target_on(cluster, plan) is one")
    named = {*target.forward.values(), *target.backward.values()}
    if unknown := sorted(named - target.kernels.keys()):
        raise PlanError(f"the target {target.name} has no facts of the kernel {unknown[0]!r}")
    if plan.target is not None:
        raise PlanError(f"the plan is compiled already, for {plan.target.name}")
    if plan.problem.element_bytes != target.element_bytes:
        raise PlanError(
            f"the plan is for {plan.problem.element_bytes}-byte elements, and the target for "
            f"{target.element_bytes}-byte ones"
        )
    passes = tuple(compile_pass(plan, pass_, target) for pass_ in plan.passes)
    return replace(plan, passes=passes, target=target)


def compile_pass(plan: Plan, pass_: Pass, target: Target) -> Pass:
    """One pass of a plan, compiled."""
    return PassCompiler(plan, pass_, target).all_programs()


@dataclass(frozen=True)
class _Placed:
    """A program before and after its buffers were placed; all programs that are alike follow it."""

    before: Program
    after: Program
    waits: Waits

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """For each operation, where it stood before its buffers were placed; -1 for a Free."""
        before = enumerate(self.before.operations)  # in their order, which stays
        return tuple(
            [
                -1 if isinstance(op, Free) else next(at for at, old in before if _is_same(old, op))
                for op in self.after.operations
            ]
        )


@lru_cache(maxsize=32)  # batches with other masks ask for the same
def _placed_alike(program: Program, problem: Problem, **target: bool) -> _Placed:
    made = placed(program, problem, **target)
    return _Placed(program, made, dependencies(made, workspace_map(made, problem)))


class PassCompiler:
    """Compiles the programs of one pass. What ranks have in common is computed once."""

    def __init__(self, plan: Plan, pass_: Pass, target: Target) -> None:
        self._plan, self._pass, self._target = plan, pass_, target
        self.clock = CallSeconds(plan, pass_.direction, target)
        self._choose = CallChooser(plan, self.clock)
        self.transfers = TransferCosts(target.links, plan, pass_)
        self.flows = SharedFlows(plan.problem)
        # Of programs compiled so far: before calls leave SMs, waits, and numbers that are equal
        # where buffers are alike.
        self._whole: dict[int, Program] = {}
        self.waits: dict[int, Waits] = {}
        self.tables: dict[int, int] = {}
        self._alike = Alike()
        self._known: dict[tuple[object, ...], _Placed] = {}
        self._first: _Placed | None = None
        self._edited: dict[tuple[Operation, Operation], Operation] = {}
        self._chosen: dict[tuple[object, ...], tuple[Attention, CallSummary]] = {}

    def all_programs(self) -> Pass:
        """The pass, each program compiled when it is asked for."""
        programs = Programs(len(self._pass.programs), lambda at: self.compiled(at)[0])
        return replace(self._pass, programs=programs)

    def compiled(self, at: int) -> tuple[Program, CallSummary]:
        """The program at this place, and what was chosen for its attentions."""
        program, summary = self._with_calls(self._pass.programs[at])
        table = self.tables[at] = self._alike.table(program)
        self._whole[at], self.waits[at] = self._placed(program, table)
        return self.leaving_sms(at), summary

    def leaving_sms(self, at: int, plan: Plan | None = None) -> Program:
        """The program at this place, which `compiled` has made, with calls that leave SMs. `plan`:
        for a plan that differs in its mask alone, where that changes no more than the SMs left."""
        program = self._whole[at]
        if not (self._target.takes_turns and runs_beside(program)):
            return program
        clock = (
            self.clock if plan is None else CallSeconds(plan, self._pass.direction, self._target)
        )
        seconds = self._seconds_of(program, self.tables[at])
        return leave_sms(program, self.waits[at], seconds, clock)

    def _placed(self, program: Program, table: int) -> tuple[Program, Waits]:
        """The program with places for its buffers, and what its operations wait for."""
        # From the second program on: most searches ask for one, and to compare takes its time.
        known, key = None, None
        if self._first is not None:
            if not self._known:
                number = self._alike.table(self._first.before)
                self._known[number, self._alike.uses(self._first.before)] = self._first
            key = table, self._alike.uses(program)
            known = self._known.get(key)
        if known is None:
            target = self._target
            known = _placed_alike(
                without_calls(program),
                self._plan.problem.of_any_mask,
                lse_gradient=target.lse_gradient,
                shows_workspace=target.shows_workspace,
            )
            if key is None:
                self._first = known
            else:
                self._known[key] = known
        operations = [
            op if source < 0 else self._as(op, program.operations[source])
            for op, source in zip(known.after.operations, known.sources, strict=True)
        ]
        own, others = program.buffer_table(), known.before.buffer_table()

        def in_place(placed: Buffer) -> Buffer:
            buffer = own[placed.name]
            if placed.offset is None:
                return buffer
            # Of the first program the very buffers were placed.
            return placed if buffer is others[placed.name] else at_offset(buffer, placed.offset)

        buffers = map(in_place, known.after.buffers)
        return Program(program.rank, tuple(buffers), tuple(operations)), known.waits

    def _as(self, made: Operation, op: Operation) -> Operation:
        """This operation, with its results where `made`, an operation like it, has them."""
        if not isinstance(made, Attention) or not isinstance(op, Attention):
            return op
        if (made, op) not in self._edited:
            self._edited[made, op] = replace(made, calls=op.calls)
        return self._edited[made, op]

    def _with_calls(self, program: Program) -> tuple[Program, CallSummary]:
        """The program with the chosen calls, which need not leave SMs yet."""
        table = program.buffer_table()
        splits = splits_wanted(program) if self._target.takes_turns else 1
        operations: list[Operation] = []
        summary = CallSummary()
        for op in program.operations:
            if isinstance(op, Attention):
                # Tokens matter only to calls by row ranges.
                q, k = table[op.q.buffer], table[op.k.buffer]
                ranges = any(call.kind is CallKind.RANGE for call in op.calls)
                key = (op, *((q, k) if ranges else (q.num_heads, k.num_heads)), splits)
                if key not in self._chosen:
                    made, of_op = self._choose(op, table, splits)
                    if splits > 1 and isinstance(made, Attend):
                        made = split_calls(made, op.q.num_heads(q), splits, self._target)
                    self._chosen[key] = made, of_op
                chosen, of_op = self._chosen[key]
                if len(chosen.calls) == 1 and chosen.calls[0].kind is CallKind.RANGE:
                    # Those of rectangles are known at once; counting others takes its time.
                    pairs = sum([self.clock.pairs(op, table, call) for call in op.calls])
                    self.clock.pairs(op, table, chosen.calls[0], pairs)
                op = chosen
                summary += of_op
            operations.append(op)
        return Program(program.rank, program.buffers, tuple(operations)), summary

    def _seconds_of(self, program: Program, number: int) -> Callable[[Communication], float]:
        """The seconds of a rank's communications."""
        rank, groups, devices = program.rank, self._pass.groups, self._plan.devices
        table = program.buffer_table()

        def seconds(op: Communication) -> float:
            flows = self.flows.of(op, number, table)
            if not isinstance(op, SendRecv):
                return self.transfers.collective(op, flows, self._pass.members[op.group][rank])
            ranks = groups[op.group]
            source, target = devices[ranks[op.from_member]], devices[ranks[op.to_member]]
            received = sum(size for size, _ in flows.received.values())
            sent = sum(flows.sent.values())
            # Over when both directions are: one of them may go to another node.
            return max(
                self.transfers.flow(source, devices[rank], received) if received else 0.0,
                self.transfers.flow(devices[rank], target, sent) if sent else 0.0,
            )

        return seconds


def _is_same(before: Operation, after: Operation) -> bool:
    """Attentions keep their task but may write elsewhere; all others stay as they are."""
    if isinstance(after, Attention):
        return isinstance(before, Attention) and before.task == after.task
    return before is after or before == after


def runs_beside(program: Program) -> bool:
    """Whether there is more than one kernel call, or a transfer."""
    calls = sum(len(op.calls) for op in program.operations if isinstance(op, Attention))
    return calls > 1 or any(isinstance(op, Communication) for op in program.operations)
