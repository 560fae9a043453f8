"""What runs is what was proven, counted and timed: operation by operation and call by call.

A kernel of its own is compiled for, simulated and run: adding one touches nothing else.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from mesh_attention import Mask, count, register_kernel, unregister_kernel, verify
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.operation_costs import ClusterCosts
from mesh_attention.kernels import BackwardInputs, Block, kind_of
from mesh_attention.kernels.reference import Reference
from mesh_attention.machine.kernel_facts import KernelRate, KernelRates, PassRates
from mesh_attention.machine.target import Target, read_target
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attention, Free, Operation
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.passes.compile import compile_plan
from mesh_attention.testing import run_local
from support.cases import Case
from support.reference import NAMES, attention, errors, tolerance

Called = tuple[str, int, int, int]  # kind, rows, keys, and SMs that are left

RATE = KernelRate(600.0, 1.0, 100.0)


class Traced(Reference):
    """Slow truth, with the facts of a fast kernel that leaves SMs where it is asked to."""

    name = "traced"
    facts = KernelRates(
        *[PassRates(True, False, 16, 10.0, RATE, None, RATE, tile_rows=1, tile_keys=4)] * 2
    )

    def __init__(self) -> None:
        self.calls: list[Called] = []

    def _called(self, block: Block) -> None:
        sizes = block.q.shape[1], block.k.shape[1], block.leave_sms
        self.calls.append((str(kind_of(block.mask)), *sizes))

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        self._called(block)
        return super().forward(block)

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        self._called(block)
        return super().backward(block, inputs)


@pytest.fixture
def traced() -> Iterator[Traced]:
    kernel = Traced()
    register_kernel(kernel)
    yield kernel
    unregister_kernel(kernel.name)


def target_of(kernel: Traced, plan: Plan) -> Target:
    cluster = load_cluster("hgx-h200")
    by_kind = dict.fromkeys(("full", "causal", "range"), kernel.name)
    return Target(
        *("here", cluster.gpu, {kernel.name: kernel.facts}, by_kind, by_kind, cluster.links),
        element_bytes=plan.problem.element_bytes,
    )


def case_of(method: str) -> Case:
    return Case(4, 50, 50, (8, 4), mask=Mask(causal=True), options={"method": method})


@pytest.mark.parametrize("method", METHODS)
def test_the_operations_and_calls_that_run_are_those_that_were_timed(
    method: str, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(method)
    plan = compile_plan(case.plan(), target_of(traced, case.plan()))
    timed: list[Operation] = []
    compute = ClusterCosts.compute

    def recorded(self: ClusterCosts, op: Operation, table: Any) -> Any:
        timed.append(op)
        return compute(self, op, table)

    monkeypatch.setattr(ClusterCosts, "compute", recorded)
    timelines = {each: simulate(plan, "hgx-h200", each) for each in Direction}

    begun: dict[tuple[Direction, int], list[Operation]] = defaultdict(list)
    ranks: list[tuple[Direction, int]] = []
    made = run_local.__globals__["make_executor"]

    def traced_executor(own_plan: Plan, each: Any, at: int, *rest: Any, **how: Any) -> Any:
        def trace(op: Operation) -> Any:
            begun[each.direction, at].append(op)
            if isinstance(op, Attention):
                ranks.extend([(each.direction, at)] * len(op.calls))
            return nullcontext()

        return made(own_plan, each, at, *rest, **how, trace=trace)

    monkeypatch.setitem(run_local.__globals__, "make_executor", traced_executor)
    run_local(plan, *case.tensors())
    by_rank: dict[tuple[Direction, int], list[Called]] = defaultdict(list)
    for where, call in zip(ranks, traced.calls, strict=True):
        by_rank[where].append(call)
    for direction, timeline in timelines.items():
        for rank in range(case.ranks):
            operations = [
                op for op in timeline.pass_.programs[rank].operations if not isinstance(op, Free)
            ]
            assert begun[direction, rank] == operations
            assert [e.name for e in timeline.events(rank)] == [op.name for op in operations]
            attentions = [op for op in operations if isinstance(op, Attention)]
            assert all(op in timed for op in attentions if op.calls)
            assert by_rank[direction, rank] == [
                (str(c.kind), c.q_stop - c.q_start, c.k_stop - c.k_start, c.leave_sms)
                for op in attentions
                for c in op.calls
            ]
    assert {call[3] for call in traced.calls} <= {0, 16}


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_plan_is_proven_exact_as_large_as_before_and_parses_back(
    method: str, traced: Traced
) -> None:
    case = case_of(method)
    before, tensors = case.plan(), case.tensors()
    target = target_of(traced, before)
    plan = compile_plan(before, target)
    assert read_target(json.loads(json.dumps(target.to_json()))) == target
    assert parse_plan(plan_text(plan)) == plan
    assert verify(plan) == []
    for direction, counted in count(plan).items():
        others = count(before)[direction]
        assert [rank.total for rank in counted.ranks] == [rank.total for rank in others.ranks]
        assert counted.peak_buffer_bytes <= others.peak_buffer_bytes
    result = run_local(plan, *tensors)
    results = {name: getattr(result, name) for name in NAMES}
    distances = errors(results, attention(*tensors, case.mask))
    assert max(distances.values()) <= tolerance(case.dtype), distances


def test_calls_beside_transfers_leave_sms_in_what_runs(traced: Traced) -> None:
    case = case_of("ring")
    run_local(compile_plan(case.plan(), target_of(traced, case.plan())), *case.tensors())
    assert {left for *_, left in traced.calls} == {0, 16}


def test_buffers_that_lie_in_each_other_are_found(traced: Traced) -> None:
    before = case_of("mesh").plan()
    plan = compile_plan(before, target_of(traced, before))
    program = plan.forward.programs[1]
    buffers = [b if b.offset is None else replace(b, offset=0) for b in program.buffers]
    programs = [*plan.forward.programs]
    programs[1] = replace(program, buffers=tuple(buffers))
    wrong = replace(plan, passes=(replace(plan.forward, programs=programs),))
    (finding,) = verify(wrong)
    assert finding.rank == 1
    assert "at the same time" in finding.message
