"""Batches of packed documents on real processes, against attention document by document."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mesh_attention import ContextParallel

__all__ = ["DIM", "HEADS", "KV_HEADS", "error", "make", "one_by_one", "tensors"]

HEADS, KV_HEADS, DIM = 6, 3, 8


def make(**changes: Any) -> ContextParallel:
    arguments: dict[str, Any] = {
        "seq_len": 64,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "causal": True,
        "dtype": torch.float32,
        **changes,
    }
    cp = ContextParallel(**arguments)
    cp._calls.session.transports.poison = True
    return cp


def tensors(starts: list[int], seed: int, batch: int = 1) -> tuple[Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM)]
    return tuple(torch.randn(batch, starts[-1], *s, generator=chance) for s in shapes)


def one_by_one(
    starts: list[int], whole: tuple[Tensor, ...], window: int | None = None
) -> list[Tensor]:
    """Out and gradients of causal attention in float64, document after document."""
    q, k, v, grad = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = []
    for a, b in pairwise(starts):
        qs, ks, vs = (x[:, a:b].transpose(1, 2) for x in leaves)
        ks, vs = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (ks, vs))
        far = torch.arange(b - a)[:, None] - torch.arange(b - a)
        hidden = (far < 0) | (far > window) if window is not None else far < 0
        scores = (qs @ ks.transpose(2, 3) * DIM**-0.5).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ vs).transpose(1, 2))
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(cp: ContextParallel, starts: list[int], seed: int, batch: int = 1) -> float:
    """The largest error of out and gradients of a batch, on this rank."""
    docs = cp.documents(starts)
    whole = tensors(starts, seed, batch)
    q, k, v, grad = (cp.shard(x, 1, documents=docs) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves, documents=docs)
    assert isinstance(out, Tensor)
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    wanted = one_by_one(starts, whole)
    errors = [
        float((a - cp.shard(b, 1, documents=docs)).abs().max())
        for a, b in zip(results, wanted, strict=True)
    ]
    return max(errors)
