"""The float64 reference against attention that autograd differentiates."""

from __future__ import annotations

import pytest
import torch
from block_cases import (
    RANGES,
    Block,
    MaskMaker,
    Result,
    Shape,
    assert_close,
    causal,
    full,
    make_block,
    run,
)

from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.visibility import dense_mask


def by_autograd(block: Block) -> Result:
    q, k, v = (x.clone().requires_grad_() for x in (block.q, block.k, block.v))
    repeats = q.shape[2] // k.shape[2]
    k_BTHD, v_BTHE = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k_BTHD) * block.scale
    visible = dense_mask(block.mask, q.shape[1], k.shape[1], q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(dim=-1).detach()
    p = scores.softmax(dim=-1)
    out = torch.einsum("bhst,bthe->bshe", p, v_BTHE)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), block.grad_out)
    return Result(out.detach(), lse, dq, dk, dv)


@pytest.mark.parametrize("mask", [full, causal, *RANGES[:3]])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_reference_agrees_with_autograd(mask: MaskMaker, heads: tuple[int, int]) -> None:
    shape = Shape(S=37, T=37, H=heads[0], G=heads[1], D=12, E=20)
    block = make_block(shape, torch.float64, mask)
    expected = by_autograd(block)
    assert_close(run(Reference(), block), expected, 1e-12, mask)
    assert_close(run(Reference(), block, delta_only=True), expected, 1e-12, mask)


def test_reference_returns_the_input_dtype_and_a_wide_log_sum_exp() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        result = run(Reference(), make_block(Shape(S=5, T=7), dtype))
        for tensor in (result.out, result.dq, result.dk, result.dv):
            assert tensor.dtype == dtype
        assert result.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
