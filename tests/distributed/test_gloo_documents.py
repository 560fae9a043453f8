"""Documents that come with every batch: exact, cheap, and never another rank's in silence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel
from support.pool import WorkerPool

HEADS, KV_HEADS, DIM = 6, 3, 8


def make(**changes: Any) -> ContextParallel:
    given: dict[str, Any] = {
        "seq_len": 64,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "causal": True,
        "dtype": torch.float32,
        **changes,
    }
    cp = ContextParallel(**given)
    cp._share.context.transports.poison = True
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
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    wanted = one_by_one(starts, whole)
    errors = [
        float((a - cp.shard(b, 1, documents=docs)).abs().max())
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(errors)


def many_batches(rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    with make(**changes) as cp:
        return [
            error(cp, [0, 5, 64], 1),
            error(cp, [0, 64], 2),
            error(cp, [0, 1, 1, 2, 40, 63], 3, batch=2),
            error(cp, [0, 97, 130], 4),
            error(cp, [0, 3], 5),
        ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"method": "mesh"}, {"layout": "contiguous"}], ids=repr)
def test_documents_and_lengths_that_change_with_every_batch_are_exact(
    pool: WorkerPool, ranks: int, changes: dict[str, Any]
) -> None:
    for errors in pool.run(many_batches, ranks, changes):
        assert max(errors) < 1e-5
