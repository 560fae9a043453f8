"""A tiny model with RoPE that calls PyTorch's own attention, on one process and inside blocks of
`cp.context_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

__all__ = [
    "DIM",
    "HEADS",
    "TOKENS",
    "Rotary",
    "batch",
    "differs",
    "entered",
    "loss_of",
    "make_model",
    "truth",
]

TOKENS, HEADS, KV_HEADS, DIM, WORDS = 24, 4, 2, 8, 13
WIDTH = HEADS * DIM


class Rotated(nn.Module):
    """A block with RoPE. Its attention is imported by name, and it saves the angles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * KV_HEADS, DIM)).transpose(1, 2).chunk(2, 1)
        q, k = (t * cos + t.roll(DIM // 2, -1) * sin for t in (q, k))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        result: Tensor = x + self.out(out.transpose(1, 2).flatten(2)).tanh()
        return result


Run = Callable[..., Tensor]


class Rotary(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))
        angle = torch.arange(TOKENS)[:, None] * torch.logspace(0, -2, DIM)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: Tensor, run: Run = lambda block, *x: block(*x)) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = run(block, x, self.cos, self.sin)
        logits: Tensor = self.head(x)
        return logits


def make_model() -> Rotary:
    torch.manual_seed(3)
    return Rotary()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, WORDS, (2, TOKENS + 1), generator=chance)
    return whole[:, :-1], whole[:, 1:]  # views, as data loaders have them


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (2 * TOKENS)


def truth(seeds: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    model, outs = make_model(), []
    for seed in seeds:
        ids, labels = batch(seed)
        outs.append(model(ids))
        loss_of(outs[-1], labels).backward()  # type: ignore[no-untyped-call]
    return [out.detach() for out in outs], [
        p.grad for p in model.parameters() if p.grad is not None
    ]


def differs(model: nn.Module, outs: list[Tensor], wanted: Any) -> float:
    """The largest error of outputs and of gradients, which are added up over the ranks."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
    pairs = zip([*outs, *grads], [*wanted[0], *wanted[1]], strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def entered(cp: ContextParallel, model: Rotary, *more: Tensor, keep: Any = ()) -> Any:
    tensors = [model.cos, model.sin, *more]
    return cp.context_parallel(
        buffers=tensors, buffer_seq_dims=[0, 0, *(1 for _ in more)], no_restore_buffers=set(keep)
    )
