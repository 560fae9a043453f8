"""One kernel call for an attention is exact: whatever the mask and the layout are, whoever writes
its results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, register_kernel, unregister_kernel
from mesh_attention.kernels import BackwardInputs, Block, MaskKind, Request, RowRange
from mesh_attention.kernels.reference import Reference
from mesh_attention.plan.language.plan import Direction
from mesh_attention.testing import run_local
from support.cases import Case


class AnyMask(Reference):
    """Takes row ranges only, and remembers what it was asked."""

    name = "any_mask"

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.softcaps: set[float] = set()

    def refuses(self, request: Request) -> str | None:
        return None if request.mask is MaskKind.RANGE else "takes row ranges"

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block.mask, RowRange)
        self.seen.append((block.q.shape[1], block.k.shape[1]))
        self.softcaps.add(block.softcap)
        return super().forward(block)

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(block.mask, RowRange)
        self.seen.append((block.q.shape[1], block.k.shape[1]))
        return super().backward(block, inputs)


@pytest.fixture
def any_mask() -> Iterator[AnyMask]:
    kernel = AnyMask()
    register_kernel(kernel)
    yield kernel
    unregister_kernel("any_mask")


MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, window=(7, None)),
    Mask(window=(5, 3)),
    Mask(causal=True, prefix=9),
    Mask(causal=True, documents=(0, 1, 1, 20, 61, 83)),
    Mask(documents=(0, 40, 83)),
]


@pytest.mark.parametrize("mask", MASKS, ids=Mask.describe)
def test_one_call_for_each_attention_is_exact(any_mask: AnyMask, mask: Mask) -> None:
    """83 tokens on 6 ranks: the last shards hold padding. Layouts take turns."""
    layout = ("zigzag", "contiguous", "striped")[MASKS.index(mask) % 3]
    case = Case(6, 83, 83, mask=mask, dtype=torch.float64, options={"layout": layout})
    plan, tensors = case.plan(), case.tensors()
    result = run_local(plan, *tensors)
    truth = run_local(plan, *tensors, kernel="reference")
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(result, name), getattr(truth, name))
    cut_otherwise = sum(
        len(op.calls) > 1
        for direction in Direction
        for program in plan.direction(direction).programs
        for op in program.operations
        if hasattr(op, "calls")
    )
    assert len(any_mask.seen) >= max(cut_otherwise, 1)


def test_a_softcap_reaches_the_kernel_and_is_exact(any_mask: AnyMask) -> None:
    case = Case(3, 40, 40, mask=Mask(causal=True), dtype=torch.float64)
    plan, (q, k, v, grad_out) = case.plan(), case.tensors()
    result = run_local(plan, 5 * q, k, v, grad_out, softcap=2.0)
    assert any_mask.softcaps == {2.0}
    with_grad = [x.clone().requires_grad_() for x in (5 * q, k, v)]
    scores = torch.einsum("bshd,bthd->bhst", with_grad[0], _spread(with_grad[1], q))
    scores = 2.0 * torch.tanh(scores * q.shape[-1] ** -0.5 / 2.0)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("bhst,bthe->bshe", weights, _spread(with_grad[2], q))
    torch.testing.assert_close(result.out, out.detach())
    expected = torch.autograd.grad(out, with_grad, grad_out)
    for name, x in zip(("grad_q", "grad_k", "grad_v"), expected, strict=True):
        torch.testing.assert_close(getattr(result, name), x)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


class WritesItself(Reference):
    """Takes the tensors in which results are wanted, as kernels on a GPU do."""

    name = "writes_itself"

    def __init__(self) -> None:
        self.written = 0

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(block)
        return self._put(out, block.into[0]), lse

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = map(self._put, super().backward(block, inputs), block.into)
        return dq, dk, dv

    def _put(self, result: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is None:
            return result
        self.written += 1
        assert wanted.dtype == result.dtype
        return wanted.copy_(result)


@pytest.mark.parametrize("method", ["mesh", "ring", "ulysses", "allgather-kv", "mesh-usp"])
def test_results_that_a_kernel_writes_itself_are_the_same(method: str) -> None:
    case = Case(
        4, 90, 90, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float32,
        options={"method": method},
    )  # fmt: skip
    plan, tensors = case.plan(), case.tensors()
    truth = run_local(plan, *tensors, kernel="reference")
    kernel = WritesItself()
    register_kernel(kernel)
    try:
        result = run_local(plan, *tensors)
    finally:
        unregister_kernel("writes_itself")
    assert kernel.written > 0
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(result, name), getattr(truth, name))
