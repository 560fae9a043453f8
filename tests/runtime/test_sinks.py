"""Attention sinks in one process: every method, against a dense softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, MeshAttentionError
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.runtime.execute.sinks import add_sinks, gradient_of_sinks
from mesh_attention.testing import run_local
from support.cases import Case
from support.sink_reference import NAMES, attention_with_sinks, distances


def sinks_of(case: Case, seed: int = 0) -> Tensor:
    """About as large as a log-sum-exp, so that they matter."""
    source = torch.Generator().manual_seed(seed)
    return 2.0 + 2.0 * torch.randn(case.heads[0], generator=source, dtype=torch.float64)


def check(case: Case, softcap: float | None = None) -> None:
    tensors, sinks = case.tensors(), sinks_of(case)
    grad_lse = torch.randn(case.batch, case.heads[0], case.q_tokens, dtype=torch.float64)
    truth = attention_with_sinks(tensors, sinks, case.mask, softcap=softcap)
    result = run_local(case.plan(), *tensors, sinks=sinks, softcap=softcap)
    results = distances({name: getattr(result, name) for name in NAMES}, truth)
    assert max(results.values()) <= 1e-10, (results, case)
    if case.options.get("gather_out"):
        return
    truth = attention_with_sinks(tensors, sinks, case.mask, grad_lse=grad_lse, softcap=softcap)
    result = run_local(case.plan(), *tensors, sinks=sinks, grad_lse=grad_lse, softcap=softcap)
    results = distances({name: getattr(result, name) for name in NAMES}, truth)
    assert max(results.values()) <= 1e-10, (results, case)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_sinks(method: str) -> None:
    case = Case(
        4, 45, 45, heads=(8, 2), batch=2, mask=Mask(causal=True), options={"method": method}
    )
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 20, 20, heads=(8, 2), mask=Mask(), options={"method": "ulysses"}),
        Case(2, 23, 9, heads=(4, 4), mask=Mask(causal=True)),  # most queries see nothing
        Case(4, 37, 37, mask=Mask(causal=True, window=(4, 0)), options={"gather_out": True}),
        Case(2, 30, 30, mask=Mask(causal=True, documents=(0, 1, 11, 30))),
    ],
    ids=["uneven heads", "rows that see nothing", "window", "documents"],
)
def test_masks_with_sinks_equal_a_dense_softmax(case: Case) -> None:
    check(case)


def test_softcap_does_not_touch_sinks() -> None:
    check(Case(2, 16, 16, heads=(4, 2), mask=Mask(causal=True)), softcap=1.5)


def test_bf16_stays_within_its_rounding() -> None:
    case = Case(4, 45, 45, heads=(8, 2), mask=Mask(causal=True), dtype=torch.bfloat16)
    tensors, sinks = case.tensors(), sinks_of(case).bfloat16()
    truth = attention_with_sinks(tensors, sinks, case.mask)
    result = run_local(case.plan(), *tensors, sinks=sinks)
    assert result.lse.dtype == torch.float32
    assert result.grad_sinks is not None
    assert result.grad_sinks.dtype == torch.bfloat16
    results = distances({name: getattr(result, name) for name in NAMES}, truth)
    assert max(results.values()) <= 0.02, results


def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all() -> None:
    case = Case(2, 23, 9, heads=(2, 2), mask=Mask(causal=True))  # with rows that see nothing
    tensors = case.tensors()
    without = run_local(case.plan(), *tensors)
    nothing = torch.full((2,), -torch.inf)
    same = run_local(case.plan(), *tensors, sinks=nothing)
    for name in NAMES[:-1]:
        assert torch.equal(getattr(same, name), getattr(without, name)), name
    assert same.grad_sinks is not None
    assert not same.grad_sinks.any()
    gone = run_local(case.plan(), *tensors, sinks=torch.full((2,), 1e4))
    assert not gone.out.any()
    assert torch.equal(gone.lse, torch.full_like(gone.lse, 1e4))
    assert all(not getattr(gone, name).any() for name in NAMES[2:])


def test_rows_that_see_nothing_add_nothing_whatever_their_gradient_holds() -> None:
    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf)
    out[:, 1] = 1.0
    lse[..., 1] = 0.5
    sinks = torch.tensor([0.5, 0.25])
    add_sinks(out, lse, sinks)
    assert torch.equal(lse[..., 0], sinks[None])
    assert (out[:, 1, 0] == 0.5).all()
    grad_out = torch.full_like(out, torch.nan)
    grad_out[:, 1] = 1.0
    results = gradient_of_sinks(out, grad_out, lse, sinks)
    assert results[0].item() == pytest.approx(-0.5 * 2.0)  # p * rowsum(out * grad_out)
    assert results.isfinite().all()


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks is \(3,\) of torch.float32; expected one .* \(4,\)"),
        (torch.zeros(4, dtype=torch.int64), "sinks is .* expected one floating-point number"),
        (torch.zeros(4, 1), "sinks is"),
        ([0.0] * 4, "sinks is list; it must be a torch.Tensor"),
        (torch.zeros(4, device="meta"), "sinks is on the meta device"),
        (torch.zeros(4, requires_grad=True), "run_local is not differentiable"),
    ],
)
def test_what_is_no_sink_for_each_head_is_refused(sinks: Tensor, message: str) -> None:
    case = Case(1, 8, 8, heads=(4, 2))
    with pytest.raises(MeshAttentionError, match=message):
        run_local(case.plan(), *case.tensors(), sinks=sinks)
