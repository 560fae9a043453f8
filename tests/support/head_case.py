"""A head of random numbers for tests of losses without logits, and the distance of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from support.tiny_gpt import VOCABULARY, WholeCase


def head(case: WholeCase, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the whole batch, weight and bias."""
    chance = torch.Generator().manual_seed(3)
    shapes = ((*case.input_ids.shape, 8), (VOCABULARY, 8), (VOCABULARY,))
    return tuple(torch.randn(shape, generator=chance, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def error(a: Tensor | None, b: Tensor) -> float:
    assert a is not None
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item()
