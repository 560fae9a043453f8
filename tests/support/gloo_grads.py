"""One case of gradients over gloo, for tests that look at them from several sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask
from support.cases import Case

CASE = Case(
    4, 45, 45, heads=(4, 2), batch=2, mask=Mask(causal=True), dtype=torch.float32,
    options={"tile": (2, 2), "chunks": (2, 2)},
)  # fmt: skip


def local(cp: ContextParallel, *, grads: tuple[bool, bool, bool] = (True, True, True)) -> Any:
    """q, k, v as leaves, and the gradient of the output."""
    q, k, v, grad_out = (cp.shard(x, 1) for x in CASE.tensors())
    leaves = [x.requires_grad_(needed) for x, needed in zip((q, k, v), grads, strict=True)]
    return leaves, grad_out


def out_of(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = cp.attention(q, k, v)
    assert isinstance(out, Tensor)
    return out


def both_of(cp: ContextParallel, *leaves: Tensor) -> tuple[Tensor, Tensor]:
    both = cp.attention(*leaves, return_lse=True)
    assert isinstance(both, tuple)
    return both


def all_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
