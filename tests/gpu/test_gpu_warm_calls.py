"""Warm calls on CUDA: no wait for the device, the memory the plan says, and the same by a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_rank import AloneTransport
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, Problem, make_plan
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.runtime.device import Workspace, WorkspaceBlock
from mesh_attention.runtime.execute.executor import CallShape, run_to_end
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.runtime.session.prepared_call import CapturedCall
from mesh_attention.runtime.transport.local import LocalTransport, Meetings
from mesh_attention.testing import _in_turns

pytestmark = pytest.mark.gpu

TOKENS, HEADS, KV_HEADS, DIM = 1024, 8, 2, 64
NAMES = ("q", "k", "v", "grad_out")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """NCCL with this process as its only rank."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def no_waiting_for_the_device() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors(seed: int, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(batch, TOKENS, h, DIM, device="cuda").bfloat16() for h in heads]


def train(cp: ContextParallel, inputs: list[Tensor]) -> list[Tensor]:
    q, k, v, grad_out = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def context(*, causal: bool = True, **options: Any) -> ContextParallel:
    return ContextParallel(
        seq_len=TOKENS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        causal=causal,
        chunks=(2, 2),
        **options,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_warm_call_over_nccl_never_waits_for_the_device(
    one_rank: None, causal: bool, batch: int
) -> None:
    inputs = tensors(0, batch)
    with context(causal=causal) as cp:
        first = train(cp, inputs)
        with no_waiting_for_the_device():
            second = train(cp, inputs)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b) or torch.allclose(a, b, rtol=0.05, atol=0.05)
        assert dict(cp.kernels()["forward rows"])["fused"] == "chosen"


def test_transfers_have_the_priority_that_replays_give_them(one_rank: None) -> None:
    with context() as cp:
        train(cp, tensors(0))
        groups, device = cp._calls.session.groups, torch.device("cuda", 0)
        backend: Any = groups.everybody()._get_backend(device)
        assert backend.options.is_high_priority_stream
        stream = cp._calls.session.transports.stream(device)
        assert stream is not None
        assert stream.priority < 0


@pytest.mark.parametrize("batch", [1, 2])
def test_a_captured_call_gives_what_an_eager_one_gives(one_rank: None, batch: int) -> None:
    with context() as eager, context(cuda_graph=True, nvtx=True) as captured:
        for seed in range(3):
            inputs = tensors(seed, batch)
            for a, b in zip(train(eager, inputs), train(captured, inputs), strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        with no_waiting_for_the_device():
            train(captured, inputs)


def test_row_ranges_can_be_captured(one_rank: None) -> None:
    """Their positions lie on the device."""
    sizes: dict[str, Any] = {
        "seq_len": TOKENS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
    }
    results = []
    for graph in (False, True):
        with ContextParallel(
            None, **sizes, causal=True, window_size=(100, 0), cuda_graph=graph
        ) as cp:
            for number in range(3):  # captured by the first, replayed by the others
                results.append(cp.attention(*tensors(number)[:3]))
    for eager, replayed in zip(results[:3], results[3:], strict=True):
        assert isinstance(eager, Tensor)
        assert isinstance(replayed, Tensor)
        torch.testing.assert_close(replayed, eager, rtol=0.02, atol=0.02)


def test_cpu_tensors_are_not_captured(one_rank: None) -> None:
    q, k, v, _ = tensors(0)
    with context(cuda_graph=True) as cp, pytest.raises(MeshAttentionError, match="CUDA tensors"):
        cp.attention(q.cpu(), k.cpu(), v.cpu())


Inputs = list[dict[str, Tensor]]


def all_ranks(
    plan: Plan, direction: Direction, call_shape: CallShape
) -> Callable[[Inputs], Inputs]:
    """The executors of all ranks in this process, made once."""
    pass_ = plan.direction(direction)
    meetings: Meetings = {}
    executors = [
        make_executor(
            plan,
            pass_,
            rank,
            LocalTransport(pass_, rank, meetings),
            Workspace(),
            call_shape,
            CallOptions(softmax_scale=0.1),
        )
        for rank in range(plan.num_ranks)
    ]
    return lambda inputs: _in_turns({r: e.run(inputs[r]) for r, e in enumerate(executors)})


def local_inputs(plan: Plan, direction: Direction, call_shape: CallShape) -> Inputs:
    """Random tensors for the inputs of all ranks' programs."""
    result = []
    for program in plan.direction(direction).programs:
        arguments = {}
        for buffer in program.buffers:
            if buffer.role.value == "input":
                width = buffer.kind.width(plan.problem)
                shape = (buffer.num_rows, call_shape.batch, buffer.num_heads, width)
                x = torch.randn(shape, device="cuda")
                x = x.add_(8.0) if buffer.kind.value == "lse" else x
                arguments[buffer.name] = x.to(call_shape.dtype_of(buffer))
        result.append(arguments)
    return result


CALL_SHAPE = CallShape(1, torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.parametrize("direction", list(Direction))
def test_ranks_in_one_process_neither_wait_nor_differ_when_captured(direction: Direction) -> None:
    problem = Problem(TOKENS, HEADS, DIM, num_kv_heads=KV_HEADS, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method="mesh", tile=(2, 2), chunks=(2, 2))
    run = all_ranks(plan, direction, CALL_SHAPE)
    inputs = local_inputs(plan, direction, CALL_SHAPE)
    first = run(inputs)
    with no_waiting_for_the_device():
        run(inputs)

    def flat(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        by_rank = [{n: arguments[f"{rank} {n}"] for n in x} for rank, x in enumerate(inputs)]
        return {f"{rank} {n}": x for rank, r in enumerate(run(by_rank)) for n, x in r.items()}

    named = {
        f"{rank} {n}": x for rank, arguments in enumerate(inputs) for n, x in arguments.items()
    }
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    captured = CapturedCall(flat, named, WorkspaceBlock(torch.empty(0, device="cuda")), stream)
    replayed = captured(named)
    for rank, result in enumerate(first):
        for name, x in result.items():
            torch.testing.assert_close(x, replayed[f"{rank} {name}"], rtol=0.02, atol=0.02)


def test_a_workspace_that_grows_is_bound_again() -> None:
    problem = Problem(TOKENS, HEADS, DIM, num_kv_heads=KV_HEADS, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method="mesh", tile=(2, 2), chunks=(2, 2))
    pass_ = plan.forward
    workspace = Workspace()
    executor = make_executor(
        plan,
        pass_,
        0,
        AloneTransport(pass_.programs[0]),
        workspace,
        CALL_SHAPE,
        CallOptions(softmax_scale=0.1),
    )
    inputs = local_inputs(plan, Direction.FORWARD, CALL_SHAPE)[0]
    run_to_end(executor.run(inputs))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    grown = workspace.take(executor.workspace_bytes * 2, CALL_SHAPE.device)
    # The old block went, although the executor had views of it.
    assert torch.cuda.memory_allocated() - before <= executor.workspace_bytes + 2**21
    run_to_end(executor.run(inputs))
    assert executor in grown.bound


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("causal", [True, False])
def test_peak_memory_is_what_the_plan_says(direction: Direction, causal: bool) -> None:
    problem = Problem(65536, 16, 128, mask=Mask(causal=causal))
    plan = make_plan(problem, 16, method="mesh", tile=(4, 4), chunks=(2, 2))
    pass_ = plan.direction(direction)
    executor = make_executor(
        plan,
        pass_,
        0,
        AloneTransport(pass_.programs[0]),
        Workspace(),
        CALL_SHAPE,
        CallOptions(softmax_scale=0.1),
    )
    inputs = local_inputs(plan, direction, CALL_SHAPE)[0]
    run_to_end(executor.run(inputs))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - executor.workspace_bytes
    torch.cuda.reset_peak_memory_stats()
    outputs = run_to_end(executor.run(inputs))
    torch.cuda.synchronize()
    result = torch.cuda.max_memory_allocated() - before
    made = sum(x.numel() * x.element_size() for x in outputs.values())
    planned = executor.workspace_bytes + made + executor.scratch_bytes
    mib = 2**20
    print(
        f"{direction} causal={causal}: peak {result / mib:.1f} MiB, planned {planned / mib:.1f} = "
        f"workspace {executor.workspace_bytes / mib:.1f} + outputs {made / mib:.1f} + "
        f"scratch of kernel calls {executor.scratch_bytes / mib:.1f}"
    )
    assert result <= 1.02 * planned
    assert result >= 0.98 * planned


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_calls_on_several_streams_share_the_workspace_one_after_the_other(
    one_rank: None, cuda_graph: bool
) -> None:
    """Two objects on one group have one workspace, and nothing but it orders their streams."""
    with context(cuda_graph=cuda_graph) as first, context(causal=False) as second:
        inputs = [tensors(seed) for seed in range(2)]
        alone = [train(cp, x) for cp, x in zip((first, second), inputs, strict=True)]
        streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(5):
            results = []
            torch.cuda.synchronize()
            for cp, x, stream in zip((first, second), inputs, streams, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
                    results.append(train(cp, x))
            torch.cuda.synchronize()
            for have, want in zip(results, alone, strict=True):
                for result, expected in zip(have, want, strict=True):
                    torch.testing.assert_close(result, expected, rtol=0, atol=2e-2)
