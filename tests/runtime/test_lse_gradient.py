"""A loss on the log-sum-exp: its gradient is folded into delta, in every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, MeshAttentionError
from mesh_attention.kernels import MaskKind, Request, choose
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import AttendBackward
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.testing import run_local
from support.cases import Case


def truth(
    tensors: tuple[Tensor, ...], grad_lse: Tensor, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v, grad_out = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(repeats, dim=2) for x in leaves[1:])
    scores = torch.einsum("bshd,bthd->bhst", leaves[0], keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhst,bthe->bshe", torch.exp(scores - lse[..., None]), values)
    loss = (out * grad_out).sum() + (lse * grad_lse).sum()
    return lse.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("alone", [False, True], ids=["beside out", "alone"])
@pytest.mark.parametrize("method", list(METHODS))
def test_gradients_of_a_loss_on_lse_are_exact(method: str, alone: bool) -> None:
    """`alone`: nothing depends on out, so no `out` could stand for what delta has to say."""
    tokens = 45
    case = Case(
        4, tokens, tokens, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float64,
        options={"method": method},
    )  # fmt: skip
    q, k, v, grad_out = case.tensors()
    grad_out = torch.zeros_like(grad_out) if alone else grad_out
    grad_lse = torch.randn(q.shape[0], q.shape[2], tokens, dtype=torch.float64)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    lse, expected = truth((q, k, v, grad_out), grad_lse, visible)
    result = run_local(case.plan(), q, k, v, grad_out, grad_lse=grad_lse)
    torch.testing.assert_close(result.lse, lse)
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), expected, strict=True):
        torch.testing.assert_close(getattr(result, name), grad, msg=name)


def test_kernels_that_take_out_are_not_asked() -> None:
    request = Request(Direction.BACKWARD, "cpu", None, torch.float32, 64, 64, 8, 2, MaskKind.FULL)
    assert choose(request).kernel.name == "cpu_flash"
    chosen = choose(replace(request, lse_gradient=True))
    assert chosen.kernel.name == "blockwise"
    assert "differentiable_lse=True needs one with `delta`" in dict(chosen.reasons)["cpu_flash"]


def test_a_plan_that_hands_out_to_its_attentions_is_refused() -> None:
    case = Case(1, 16, 16, mask=Mask(), dtype=torch.float32)
    q, k, v, grad_out = case.tensors()
    plan = with_out(case.plan())
    run_local(plan, q, k, v, grad_out)
    with pytest.raises(MeshAttentionError, match="hands `out` to its attentions"):
        run_local(plan, q, k, v, grad_out, grad_lse=torch.ones(q.shape[0], q.shape[2], 16))


def with_out(plan: Plan) -> Plan:
    """A backward pass that takes the row sums from `out`."""
    backward = plan.direction(Direction.BACKWARD)
    program = backward.programs[0]
    operations = tuple(
        replace(op, out=replace(op.grad_out, buffer="out"), delta=None)
        if isinstance(op, AttendBackward)
        else op
        for op in program.operations
    )
    changed = replace(backward, programs=(replace(program, operations=operations),))
    return replace(plan, passes=(plan.direction(Direction.FORWARD), changed))


def test_wrong_shapes_are_named() -> None:
    case = Case(1, 16, 16, mask=Mask(), dtype=torch.float32)
    q, k, v, grad_out = case.tensors()
    with pytest.raises(MeshAttentionError, match="grad_lse needs grad_out"):
        run_local(case.plan(), q, k, v, grad_out, grad_lse=torch.ones(3))
    with pytest.raises(MeshAttentionError, match="grad_lse needs grad_out"):
        run_local(case.plan(), q, k, v, grad_lse=torch.ones(q.shape[0], q.shape[2], 16))
