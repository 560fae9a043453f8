"""Kernels that users register are like the library's own: prepared for, counted, chosen by pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_rank import AloneTransport
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, Plan, register_kernel
from mesh_attention.kernels import (
    BackwardInputs,
    BackwardNeeds,
    Block,
    BlockSize,
    KernelResultError,
    MaskKind,
    Request,
    unregister,
)
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels
from mesh_attention.kernels.visibility import dense_mask
from mesh_attention.machine.kernel_facts import KernelRate, KernelRates, PassRates
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.execute.executor import CallShape, Executor, run_to_end
from mesh_attention.runtime.session import prepare
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.prepare import make_executor
from mesh_attention.testing import run_local
from support.cases import Case
from support.reference import NAMES, attention, errors, tolerance

OWN_BYTES = {Direction.FORWARD: 1000, Direction.BACKWARD: 3000}
CPU = torch.device("cpu")


class ForwardOnly:
    """Dense or causal attention of somebody else's, of one query head a key head; no base class."""

    name = "forward_only"
    backward_needs: BackwardNeeds | None = None

    def refuses(self, request: Request) -> str | None:
        if request.mask is MaskKind.RANGE:
            return "has no row-range mask"
        return None if request.num_heads == request.num_kv_heads else "wants as many KV heads"

    def scratch_bytes(self, direction: Direction, block: BlockSize) -> int:
        return OWN_BYTES[direction]

    def scores(self, block: Block) -> Tensor:
        q, k, _, mask, scale, *_ = block
        scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
        visible = dense_mask(mask, q.shape[1], k.shape[1], q.device)
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        scores = self.scores(block)
        out = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), block.v)
        return out, scores.logsumexp(-1)


class BothPasses(ForwardOnly):
    """Asks for what it is told to ask for, and takes nothing else."""

    name = "both_passes"

    def __init__(self, needs: BackwardNeeds) -> None:
        self.backward_needs = needs

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, softmax_scale, *_ = block
        grad_out, out, lse, delta = inputs
        needs = self.backward_needs
        assert needs is not None
        assert out is not None or not needs.out
        assert delta is not None or not needs.delta
        if needs.finite_lse:
            assert lse.is_contiguous()
            assert torch.isfinite(lse).all()
        if needs.out or delta is None:
            assert out is not None
            rows = torch.einsum("bshe,bshe->bhs", out, grad_out)
        else:
            rows = delta
        p = torch.exp(self.scores(block) - lse[..., None])
        ds = p * (torch.einsum("bshe,bthe->bhst", grad_out, v) - rows[..., None]) * softmax_scale
        dq, dk = torch.einsum("bhst,bthd->bshd", ds, k), torch.einsum("bhst,bshd->bthd", ds, q)
        return dq, dk, torch.einsum("bhst,bshe->bthe", p, grad_out)


@contextmanager
def registered(kernel: Any) -> Iterator[None]:
    register_kernel(kernel)
    try:
        yield
    finally:
        unregister(kernel.name)


def case(*, gather_out: bool = False) -> Case:
    options = {"tile": (2, 2), "chunks": (2, 2), "layout": "zigzag", "gather_out": gather_out}
    mask = Mask(causal=True)
    return Case(4, 64, 64, heads=(2, 2), mask=mask, dtype=torch.float64, options=options)


def executor(plan: Plan, direction: Direction, kernel: str) -> Executor:
    pass_ = plan.direction(direction)
    transport = AloneTransport(pass_.programs[0])
    shape = CallShape(1, torch.float64, CPU)
    return make_executor(
        plan, pass_, 0, transport, Workspace(), shape, CallOptions(softmax_scale=1.0, kernel=kernel)
    )


def exact(case: Case, kernel: str) -> None:
    q, k, v, grad_out = case.tensors()
    result = run_local(case.plan(), q, k, v, grad_out, kernel=kernel)
    distances = errors(
        {name: getattr(result, name) for name in NAMES}, attention(q, k, v, grad_out, case.mask)
    )
    assert max(distances.values()) <= tolerance(case.dtype), distances


NEEDS = [
    BackwardNeeds(),
    BackwardNeeds(out=True),
    BackwardNeeds(delta=True, finite_lse=True),
    BackwardNeeds(out=True, delta=True, finite_lse=True),
]


@pytest.mark.parametrize("gather_out", [False, True], ids=["plan-has-delta", "plan-has-out"])
@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_a_kernel_that_is_none_of_ours_is_given_what_it_declares(
    needs: BackwardNeeds, gather_out: bool
) -> None:
    with registered(BothPasses(needs)):
        exact(case(gather_out=gather_out), "both_passes")


def test_autocast_around_a_run_reaches_no_kernel() -> None:
    """Neither ours, which multiplies float32 matrices in plain PyTorch, nor a user's."""
    plan = Case(4, 64, 64, heads=(2, 2), mask=Mask(causal=True), dtype=torch.float32).plan()
    tensors = [x.float() for x in case().tensors()]
    with registered(BothPasses(BackwardNeeds())):
        for kernel in ("blockwise", "both_passes"):
            wanted = run_local(plan, *tensors, kernel=kernel)
            with torch.autocast("cpu", torch.bfloat16):
                result = run_local(plan, *tensors, kernel=kernel)
                assert torch.is_autocast_enabled("cpu")
            for name in NAMES:
                assert torch.equal(getattr(result, name), getattr(wanted, name)), (kernel, name)


class Wrong(BothPasses):
    """Returns something else than it should, in one of its passes."""

    name = "wrong"

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__(BackwardNeeds())
        self.change = {"forward": forward, "backward": backward}

    def forward(self, block: Block) -> Any:
        change, result = self.change["forward"], super().forward(block)
        return change(*result) if change else result

    def backward(self, block: Block, inputs: BackwardInputs) -> Any:
        change, result = self.change["backward"], super().backward(block, inputs)
        return change(*result) if change else result


WRONG_RESULTS: dict[str, tuple[Wrong, str]] = {
    "only out": (Wrong(lambda out, lse: out), "not a tensor"),
    "three": (Wrong(lambda out, lse: (out, lse, lse)), "not 3 values"),
    "nothing": (Wrong(lambda out, lse: None), "not NoneType"),
    "no tensor": (Wrong(lambda out, lse: (out, 1.0)), "its lse is float"),
    "rows last": (Wrong(lambda out, lse: (out.transpose(1, 2), lse)), "its out is a tensor"),
    "one lse": (Wrong(lambda out, lse: (out, lse[:, :1])), "its lse is a tensor"),
    "lse with a width": (Wrong(lambda out, lse: (out, lse[..., None])), "its lse is a tensor"),
    "narrow lse": (Wrong(lambda out, lse: (out, lse.half())), "its lse is torch.float16, and must"),
    "narrow out": (Wrong(lambda out, lse: (out.half(), lse)), "its out is torch.float16, and must"),
    "two gradients": (Wrong(backward=lambda q, k, v: (q, k)), "not 2 values"),
    "swapped": (Wrong(backward=lambda q, k, v: (q, v[..., :4], k)), "its dk is a tensor"),
    "narrow": (Wrong(backward=lambda q, k, v: (q, k, v.half())), "its dv is torch.float16"),
}


@pytest.mark.parametrize("which", WRONG_RESULTS)
def test_a_kernel_that_returns_something_else_is_named_with_what_is_expected(which: str) -> None:
    kernel, message = WRONG_RESULTS[which]
    method, names = ("forward", "out") if kernel.change["forward"] else ("backward", "dq")
    with registered(kernel), pytest.raises(KernelResultError, match=message) as info:
        exact(case(), "wrong")
    assert f"kernel 'wrong': {method} of a block with q (1, " in str(info.value)
    assert f"must return ({names} (1, " in str(info.value)


def test_results_may_be_wider_than_the_inputs() -> None:
    plan = Case(4, 64, 64, heads=(2, 2), mask=Mask(causal=True), dtype=torch.float32).plan()
    wide = Wrong(
        lambda out, lse: (out.double(), lse.double()),
        lambda q, k, v: (q.double(), k.double(), v.double()),
    )
    with registered(wide):
        run_local(plan, *(x.float() for x in case().tensors()), kernel="wrong")


def test_results_are_checked_in_every_call() -> None:
    """A row that is broadcast over all others would be wrong without a word."""
    plan = case().plan()
    kernel = Wrong(lambda out, lse: (out[:, :1], lse))
    good, kernel.change["forward"] = kernel.change["forward"], None
    with registered(kernel):
        program_of_rank = executor(plan, Direction.FORWARD, "wrong")
        named = zip(("q", "k", "v"), case().tensors()[:3], strict=True)
        inputs = {name: x[:, :16].transpose(0, 1).contiguous() for name, x in named}
        run_to_end(program_of_rank.run(inputs))
        kernel.change["forward"] = good
        with pytest.raises(KernelResultError, match="kernel 'wrong': forward"):
            run_to_end(program_of_rank.run(inputs))


def test_calls_of_one_operation_share_what_is_made_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    stand_in = RowKernels.stand_in

    def watched(self: RowKernels, grad_out: Tensor, delta: Tensor) -> Tensor:
        made.append(grad_out.shape[1])
        return stand_in(self, grad_out, delta)

    monkeypatch.setattr(RowKernels, "stand_in", watched)
    with registered(BothPasses(BackwardNeeds(out=True))):
        exact(case(), "both_passes")
    attentions = [
        op
        for program in case().plan().backward.programs
        for op in program.operations
        if isinstance(op, AttendBackward) and op.calls
    ]
    assert len(made) == len(attentions)
    assert sum(len(op.calls) for op in attentions) > len(attentions)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_the_scratch_that_a_kernel_declares_is_counted_with_its_preparation(
    needs: BackwardNeeds,
) -> None:
    plan = case().plan()
    with registered(BothPasses(needs)):
        results = {d: executor(plan, d, "both_passes").scratch_bytes for d in Direction}
    assert results[Direction.FORWARD] == OWN_BYTES[Direction.FORWARD]
    heads, width, element = 2, 8, 8
    prepared = []
    for op in plan.backward.programs[0].operations:
        if isinstance(op, AttendBackward) and op.calls:
            assert op.delta is not None
            runs = {(call.q_start, call.q_stop) for call in op.calls}
            rows = max(b for _, b in runs) - min(a for a, _ in runs)
            stand_in = rows * heads * width * element if needs.out else 0
            lse = sum(b - a for a, b in runs) * heads * element if needs.finite_lse else 0
            prepared.append(stand_in + lse)
    assert results[Direction.BACKWARD] == OWN_BYTES[Direction.BACKWARD] + max(prepared)


def test_a_forced_kernel_with_a_forward_only_leaves_the_backward_pass_to_another() -> None:
    with registered(ForwardOnly()):
        exact(case(), "forward_only")
        plan = case().plan()
        forward = executor(plan, Direction.FORWARD, "forward_only").choices
        backward = executor(plan, Direction.BACKWARD, "forward_only").choices
    for choice in forward.values():
        assert choice.reasons == (("forward_only", "chosen"),)
    for choice in backward.values():
        assert choice.kernel.name == "cpu_flash"
        assert choice.reasons[0] == ("forward_only", "has no backward pass")
        assert choice.reasons[-1] == ("cpu_flash", "chosen")


def test_a_context_parallel_tells_which_kernel_each_pass_uses_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mesh_attention")
    prepare._log_once.cache_clear()  # other tests use the kernel too
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with registered(ForwardOnly()):
            cp = ContextParallel(
                None, seq_len=16, num_heads=2, head_dim=8, causal=True,
                dtype=torch.float32, kernel="forward_only",
            )  # fmt: skip
            q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3))
            out = cp.attention(q, k, v)
            assert isinstance(out, Tensor)
            torch.autograd.backward(out.sum())
        message, memory = cp.kernels(), cp.memory()
        cp.close()
    finally:
        dist.destroy_process_group()
    assert list(memory) == ["forward", "backward"]
    assert memory["backward"].kernel_bytes >= 3 * 16 * 2 * 8 * 4  # the three gradients
    assert message["forward causal"] == (("forward_only", "chosen"),)
    said = "forward calls with a causal mask on cpu: kernel forward_only"
    assert caplog.messages.count(said) == 1
    backward = message["backward causal"]
    assert backward[0] == ("forward_only", "has no backward pass")
    assert backward[-1] == ("cpu_flash", "chosen")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"forward": 1}, "must be KernelRates"),
        (KernelRates(PassRates(True, False, 0, 1.0)), "with at least one curve"),
        (
            KernelRates(PassRates(False, False, 0, 1.0, KernelRate(0.0, 1, 1))),
            "full.tflops = 0.0 must be above 0",
        ),
        (
            KernelRates(None, PassRates(False, False, 0, 1.0, KernelRate(float("nan"), 1, 1))),
            "backward.full.tflops = nan must be a number",
        ),
    ],
)
def test_wrong_facts_are_refused_when_a_kernel_is_registered(facts: Any, message: str) -> None:
    kernel = type("Mine", (Reference,), {"name": "mine", "facts": facts})()
    with pytest.raises(MeshAttentionError, match=f"'mine' has wrong `facts`.*{message}"):
        register_kernel(kernel)
