"""Liger's kernel for losses against float64, in Triton's interpreter, which knows no softcap;
`tests/gpu/test_gpu_losses.py` has that, and 16 bits. And the choice among kernels of losses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mesh_attention import MeshAttentionError
from mesh_attention.train import loss_kernels
from mesh_attention.train.chunked_logits import Factors, Head, Targets
from mesh_attention.train.loss_kernels import CrossEntropy, LigerLoss, choose_loss, why_not_liger
from support.head_case import error, true_loss
from support.interpreted_liger import interpreted_liger

HEAD = Head(torch.float32, chunk_tokens=3)
BFLOAT16 = ("cuda", (9, 0), torch.bfloat16, False)


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    yield
    loss_kernels._why_not_installed.cache_clear()


def test_losses_and_gradients_by_liger_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Called directly: the kernel refuses CPUs, where only tests want it."""
    monkeypatch.setitem(sys.modules, "peft", None)  # Liger would load it, and transformers
    chance = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=chance) for shape in ((7, 8), (37, 8), (37,))]
    tokens = torch.randint(37, (7,), generator=chance)
    ignored = torch.arange(7) % 4 == 0
    targets = Targets(tokens.masked_fill(ignored, 0), ignored, HEAD)
    doubles = [x.double().requires_grad_() for x in parts]
    logits = doubles[0] @ doubles[1].T + doubles[2]
    with interpreted_liger():
        settings: tuple[dict[str, float], ...] = ({}, {"label_smoothing": 0.2, "z_loss": 0.1})
        for how in settings:
            wanted = true_loss(logits, tokens.masked_fill(ignored, -100), **how)
            true = torch.autograd.grad(wanted, [*doubles, logits], retain_graph=True)
            loss, leaves = LigerLoss(**how), [x.clone().requires_grad_() for x in parts]
            own = logits.detach().float().requires_grad_()
            total, other, without = (
                CrossEntropy.apply(targets, loss, needs_grad, *Factors(*factors))  # type: ignore[no-untyped-call]
                for factors, needs_grad in ((leaves, True), ((own,), True), (leaves, False))
            )
            grads = [torch.autograd.grad(total, leaves, retain_graph=x) for x in (True, False)]
            [of_logits] = torch.autograd.grad(other, own)
            errors = [error(x, wanted) for x in (total, other, without)]
            errors += [error(*pair) for x in grads for pair in zip(x, true, strict=False)]
            assert max(*errors, error(of_logits, true[-1])) < 1e-5
            assert error(own, logits) < 1e-6  # the caller's logits are as they were


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({0: "cpu", 1: None}, "runs on cuda, not on cpu"),
        ({1: (7, 5)}, "needs compute capability 8.0, found (7, 5)"),
        ({2: torch.float64}, "takes float32, bfloat16 and float16, not torch.float64"),
        ({3: True}, "takes logits in torch.bfloat16, where the product of low_rank"),
        ({}, "is not installed"),
    ],
)
def test_a_loss_that_liger_cannot_make_is_refused_with_the_reason(
    changed: dict[int, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, loss_kernels._LIGER.module, raising=False)
    asked: Any = [changed.get(number, x) for number, x in enumerate(BFLOAT16)]
    assert reason in str(why_not_liger(*asked))


def test_a_kernel_of_losses_is_chosen_by_name_or_the_first_that_can() -> None:
    factors = Factors(torch.zeros(4, 8))
    loss, reasons = choose_loss(None, HEAD, factors, 0.0, 0.0)
    assert type(loss) is not LigerLoss
    assert reasons == (("liger", "runs on cuda, not on cpu"), ("plain", "chosen"))
    assert choose_loss("plain", HEAD, factors, 0.0, 0.0)[1] == (("plain", "chosen"),)
    with pytest.raises(MeshAttentionError, match="kernel='liger' cannot make this loss: runs on"):
        choose_loss("liger", HEAD, factors, 0.0, 0.0)
    with pytest.raises(MeshAttentionError, match="kernel='fast': must be liger or plain, or None"):
        choose_loss("fast", HEAD, factors, 0.0, 0.0)  # type: ignore[arg-type]
