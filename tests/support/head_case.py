"""A head of random numbers for tests of losses without logits, the loss of whole logits, and the
distance of two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from support.tiny_gpt import VOCABULARY, WholeCase


def head(case: WholeCase, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the whole batch, weight and bias."""
    chance = torch.Generator().manual_seed(3)
    shapes = ((*case.input_ids.shape, 8), (VOCABULARY, 8), (VOCABULARY,))
    return tuple(torch.randn(shape, generator=chance, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def true_loss(logits: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """The sum over all targets, from whole logits."""
    cap = how.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        reduction="none",
        label_smoothing=how.get("label_smoothing", 0.0),
    )
    squares = logits.flatten(0, -2).logsumexp(-1).square() * how.get("z_loss", 0.0)
    total: Tensor = losses.sum() + squares[targets.flatten() != -100].sum()
    return total


def error(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item()
