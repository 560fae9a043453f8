"""Warm calls decide nothing: what was bound stays bound, and nothing of the caller's is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_rank import AloneTransport
from torch import Tensor

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.kernels import Block, MaskKind, Request, RowKernels
from mesh_attention.machine.rates import usual_links
from mesh_attention.plan.language.buffers import Buffer, Kind, Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Free, Merge, Operation
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute import binding
from mesh_attention.runtime.execute.attentions import Attentions
from mesh_attention.runtime.execute.binding import Views, Work, merge_work
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor, target_here
from mesh_attention.runtime.session.prepared_call import PassReport
from mesh_attention.runtime.transport.local import LocalTransport

CALL_SHAPE = CallShape(1, torch.float32, torch.device("cpu"))
OPTIONS = CallOptions(softmax_scale=0.3)


def receive(buffer: Buffer, tensor: Tensor) -> None:
    torch.manual_seed(len(buffer.name))
    tensor.normal_()
    if buffer.kind is Kind.LSE:
        tensor.add_(5.0)


def make(direction: Direction, workspace: Workspace) -> tuple[Executor, Plan, Pass]:
    problem = Problem(64, 2, 8, element_bytes=4, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method="mesh", tile=(2, 2), chunks=(2, 2))
    pass_ = plan.direction(direction)
    transport = AloneTransport(pass_.programs[0], receive)
    executor = make_executor(plan, pass_, 0, transport, workspace, CALL_SHAPE, OPTIONS)
    return executor, plan, pass_


def inputs(plan: Plan, pass_: Pass) -> dict[str, Tensor]:
    tensors = {}
    for buffer in pass_.programs[0].buffers:
        if buffer.role.is_filled:
            shape = (buffer.num_rows, 1, buffer.num_heads, buffer.kind.width(plan.problem))
            tensors[buffer.name] = torch.empty(shape)
            receive(buffer, tensors[buffer.name])
    return tensors


def test_on_a_cpu_transfers_have_no_stream_whatever_the_transport_says() -> None:
    transport: Any = SimpleNamespace(own_stream=True, shows_workspace=False)
    request = Request(Direction.FORWARD, "cpu", None, torch.float32, 8, 8, 1, 1, MaskKind.FULL)
    assert not target_here(request, {}, CALL_SHAPE, transport, usual_links()).own_stream


def test_ranks_in_one_process_have_no_stream_of_transfers_on_any_device() -> None:
    request = Request(Direction.FORWARD, "cuda", None, torch.float32, 8, 8, 1, 1, MaskKind.FULL)
    pass_ = make_plan(Problem(8, 1, 8), 1, method="mesh").forward
    transport = LocalTransport(pass_, 0, {})
    assert not target_here(request, {}, CALL_SHAPE, transport, usual_links()).own_stream


@pytest.fixture(params=list(Direction))
def direction(request: pytest.FixtureRequest) -> Direction:
    direction: Direction = request.param
    return direction


def test_a_warm_call_binds_only_what_touches_the_callers_tensors(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, plan, pass_ = make(direction, Workspace(poison=True))
    tensors = inputs(plan, pass_)
    first = run_to_end(executor.run(tensors))
    bound: list[Merge] = []

    def watched(rows: RowKernels, op: Merge, views: Views) -> Work:
        bound.append(op)
        return merge_work(rows, op, views)

    monkeypatch.setattr(binding, "merge_work", watched)
    monkeypatch.delattr(Attentions, "bind")  # attention works on gathered buffers
    second = run_to_end(executor.run(tensors))
    table = pass_.programs[0].buffer_table()
    for op in bound:
        touched = {table[piece.buffer].role for piece in (*op.inputs, *op.outputs)}
        assert touched & {Role.INPUT, Role.OUTPUT}, op
    assert bound
    for name, x in first.items():
        assert torch.equal(x, second[name])


def test_batches_share_what_is_made_ready_and_keep_their_masks(direction: Direction) -> None:
    def plan_for(*documents: int) -> Plan:
        mask = Mask(causal=True, documents=(0, *documents, 64)) if documents else Mask()
        problem = Problem(64, 2, 8, element_bytes=4, mask=mask)
        return make_plan(problem, 4, method="mesh", tile=(1, 4), layout="zigzag", one_call=True)

    def executor_for(plan: Plan, workspace: Workspace) -> Executor:
        pass_ = plan.direction(direction)
        transport = AloneTransport(pass_.programs[0], receive)
        return make_executor(plan, pass_, 0, transport, workspace, CALL_SHAPE, OPTIONS)

    base = executor_for(plan_for(), Workspace(poison=True))
    results = []
    for start in (20, 36):
        plan = plan_for(start)
        pass_ = plan.direction(direction)
        assert pass_ is plan_for().direction(direction)
        alone, alike = executor_for(plan, Workspace()), base.for_mask(plan, {}, by_mask=True)
        results.append([run_to_end(x.run(inputs(plan, pass_))) for x in (alone, alike)])
    for expected, result in results:
        assert all(torch.equal(x, result[name]) for name, x in expected.items())
    first, second = (result for _, result in results)
    assert not all(torch.equal(x, second[name]) for name, x in first.items())


def test_a_workspace_that_grows_is_bound_again(direction: Direction) -> None:
    workspace = Workspace(poison=True)
    executor, plan, pass_ = make(direction, workspace)
    tensors = inputs(plan, pass_)
    first = run_to_end(executor.run(tensors))
    old = weakref.ref(workspace.take(0, CALL_SHAPE.device).memory)
    workspace.take(2 * executor.workspace_bytes, CALL_SHAPE.device)
    assert old() is None  # although the executor had views of it
    second = run_to_end(executor.run(tensors))
    for name, x in first.items():
        assert torch.equal(x, second[name])


def test_the_callers_tensors_are_let_go(direction: Direction) -> None:
    executor, plan, pass_ = make(direction, Workspace())
    tensors = inputs(plan, pass_)
    result = run_to_end(executor.run(tensors))
    watched = [weakref.ref(x) for x in (*tensors.values(), *result.values())]
    del tensors, result
    assert [x for x in watched if x() is not None] == []


def test_a_workspace_keeps_nothing_of_an_executor_that_is_gone(direction: Direction) -> None:
    workspace = Workspace()
    executor, plan, pass_ = make(direction, workspace)
    run_to_end(executor.run(inputs(plan, pass_)))
    block = workspace.take(0, CALL_SHAPE.device)
    assert len(block.bound) == 2  # by the executor, and by its frame
    del executor
    gc.collect()
    assert len(block.bound) == 0


def test_a_report_tells_the_memory_of_an_executor_that_is_gone_but_for_its_masks() -> None:
    problem = Problem(64, 2, 8, element_bytes=4, mask=Mask(causal=True))
    plan = make_plan(problem, 2, method="ulysses")
    transport: Any = AloneTransport(plan.forward.programs[0], receive)
    executor = make_executor(plan, plan.forward, 0, transport, Workspace(), CALL_SHAPE, OPTIONS)
    report = PassReport(executor, transport)
    memory = report.memory
    assert memory == executor.memory
    assert memory.kept_bytes > 0
    del executor
    gc.collect()
    assert report.memory == replace(memory, mask_bytes=0)


def test_every_operation_is_traced_under_its_name(direction: Direction) -> None:
    _, plan, pass_ = make(direction, Workspace())
    seen: list[str] = []

    @contextmanager
    def span(op: Operation) -> Iterator[None]:
        seen.append(op.name)
        yield

    transport = AloneTransport(pass_.programs[0], receive)
    traced = make_executor(plan, pass_, 0, transport, Workspace(), CALL_SHAPE, OPTIONS, trace=span)
    run_to_end(traced.run(inputs(plan, pass_)))
    operations = pass_.programs[0].operations
    assert seen == [op.name for op in operations if not isinstance(op, Free)]


def test_kernels_are_asked_once_for_the_mask_of_calls_that_are_alike() -> None:
    problem = Problem(64, 4, 8, element_bytes=4, mask=Mask(causal=True, window=(9, 0)))
    plan = make_plan(problem, 2, method="seen", head_slices=(2, 2))
    pass_, asked = plan.forward, []

    class Asked:
        def prepare(self, direction: Direction, block: Block) -> None:
            asked.append((block.mask, block.q.shape[1:3], block.k.shape[1:3]))

    transport = AloneTransport(pass_.programs[0], receive)
    executor = make_executor(plan, pass_, 0, transport, Workspace(), CALL_SHAPE, OPTIONS)
    executor.attentions.kernels = dict.fromkeys(executor.attentions.kernels, Asked())  # type: ignore[arg-type]
    executor.attentions.prepare_kernels()
    assert len(executor.attentions.masks) == 2  # slices of heads
    calls = [
        (mask, (call.q_stop - call.q_start, 2), (call.k_stop - call.k_start, 2))
        for at, masks in executor.attentions.masks.items()
        for call, mask in zip(pass_.programs[0].operations[at].calls, masks, strict=True)  # type: ignore[union-attr]
    ]
    assert asked == list(dict.fromkeys(calls))
    assert len(calls) >= 2 * len(asked)
