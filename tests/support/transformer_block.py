"""A transformer block as models have it, whose attention is that of a `ContextParallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mesh_attention import ContextParallel

__all__ = ["HEADS", "HEAD_DIM", "WIDTH", "Decoder", "rotate"]

HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM


class Decoder(nn.Module):
    """Norm, q, k and v, rotary positions, attention and MLP, with sinks where asked for."""

    def __init__(self, cp: ContextParallel, *, sinks: bool = False) -> None:
        super().__init__()
        self.cp = cp
        self.before = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.sinks = nn.Parameter(torch.ones(HEADS)) if sinks else None

    def forward(self, x: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = heads.unbind(2)
        q, k = rotate(q, positions), rotate(k, positions)
        seen = self.cp.attention(q, k, v, documents=documents, sinks=self.sinks)
        assert isinstance(seen, Tensor)
        x = x + self.out(seen.flatten(2))
        out: Tensor = x + self.mlp(self.after(x))
        return out


def rotate(x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
    half = x_BSHD.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x_BSHD.device) / half)
    angles = (positions_S[:, None] * rates)[:, None, :]
    a, b = x_BSHD.float().chunk(2, -1)
    turned = torch.cat(
        (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1
    )
    return turned.to(x_BSHD.dtype)
