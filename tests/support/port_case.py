"""Whole tensors, their attention in float64 on one process, and how far ranks are from it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

Told = tuple[list[str], list[float]]  # errors, and how far results are from the truth


def whole(tokens: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, tokens, 4, 8, generator=chance) for _ in range(3)]


def truth(tensors: list[Tensor], starts: list[int], *, causal: bool = True) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in tensors)
    parts = [
        scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=causal)
        for a, b in pairwise(starts)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def apart(
    cp: ContextParallel, out: Any, tensors: list[Tensor], starts: list[int], **how: Any
) -> float:
    whole_out = cp.unshard(out, 1, documents=how.pop("documents", None))
    return float((whole_out - truth(tensors, starts, **how)).abs().max())
