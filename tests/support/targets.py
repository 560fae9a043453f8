"""Targets for tests: a kernel for each kind of call, on an H200 whose transfers have no stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mesh_attention.machine.kernel_facts import KINDS, UNKNOWN, library_facts
from mesh_attention.machine.load import load_cluster
from mesh_attention.machine.rates import USUAL
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attention, Operation, Program
from mesh_attention.plan.passes.choose_calls import CallChooser, CallSummary
from mesh_attention.plan.passes.seconds import CallSeconds

__all__ = ["SLOW_AND_ANY_MASK", "target_with", "with_calls"]


def target_with(
    full: str | None, causal: str | None, by_range: str | None, **changes: Any
) -> Target:
    """Kernels by name. One that the library does not have is fast, and takes any mask."""
    names = zip(KINDS, (full, causal, by_range), strict=True)
    by_kind = {kind: name for kind, name in names if name is not None}
    known = library_facts()
    kernels = {name: known[name].rates if name in known else UNKNOWN for name in by_kind.values()}
    usual = load_cluster(USUAL)
    target = Target(
        *("test", usual.gpu, kernels, by_kind, by_kind, usual.links),
        own_stream=False,
    )
    return replace(target, **changes)


SLOW_AND_ANY_MASK = target_with("reference", "reference", "any_mask")


def with_calls(
    program: Program, plan: Plan, direction: Direction, target: Target
) -> tuple[Program, CallSummary]:
    """The program with the calls that are chosen for its attentions, and nothing else changed."""
    choose = CallChooser(plan, CallSeconds(plan, direction, target))
    table, summary = program.buffer_table(), CallSummary()
    operations: list[Operation] = []
    for op in program.operations:
        if isinstance(op, Attention):
            op, of_op = choose(op, table, 1)
            summary += of_op
        operations.append(op)
    return replace(program, operations=tuple(operations)), summary
