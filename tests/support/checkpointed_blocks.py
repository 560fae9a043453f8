"""Transformer blocks with attention over all ranks, and the ways to checkpoint them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel
from mesh_attention.train.keep_attention import KeepAttention

__all__ = ["Block", "Run", "equal", "not_reentrant", "plain", "reentrant"]

Run = Callable[..., Tensor]
Heads = tuple[int, int, int]  # of queries, of keys, and the size of one


class Block(nn.Module):
    def __init__(self, cp: ContextParallel, heads: Heads, dropout: float = 0.0) -> None:
        super().__init__()
        queries, keys, self.head_dim = heads
        width = queries * self.head_dim
        self.cp = cp
        self.split = [queries, keys, keys]
        self.qkv = nn.Linear(width, sum(self.split) * self.head_dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Dropout(dropout), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, angles: Tensor, documents: Any = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)) * angles
        seen = self.cp.attention(*qkv.split(self.split, dim=2), documents=documents)
        assert isinstance(seen, Tensor)
        x = x + self.out(seen.flatten(2))
        out: Tensor = x + self.mlp(x)
        return out


def plain(block: Any, *args: Any) -> Tensor:
    out: Tensor = block(*args)
    return out


def not_reentrant(keep: KeepAttention | None, block: Any, *args: Any) -> Tensor:
    how: dict[str, Any] = {} if keep is None else {"context_fn": keep}
    out: Tensor = checkpoint(block, *args, use_reentrant=False, **how)
    return out


def reentrant(keep: KeepAttention, block: Any, *args: Any) -> Tensor:
    out: Tensor = checkpoint(keep.reentrant(block), *args, use_reentrant=True)
    return out


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
