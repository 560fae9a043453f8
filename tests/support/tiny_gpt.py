"""A tiny GPT and a few batches as training code has them, on one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["HEADS", "HEAD_DIM", "VOCABULARY", "Model", "WholeCase", "make_model", "one_process"]

HEADS, HEAD_DIM, VOCABULARY, MOST_TOKENS = 2, 8, 19, 64
WIDTH = HEADS * HEAD_DIM

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, tokens, heads, head_dim)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        out: Tensor = x + self.out(attention(*heads.unbind(2)).flatten(2)).tanh()
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(MOST_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.token(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, attention)
        logits: Tensor = self.head(x)
        return logits


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


@dataclass(frozen=True)
class WholeCase:
    """`arguments` are those of shard_batch besides ids and labels; `documents` of each row, by
    hand, and how many of them are padding at the end or, negative, at the begin."""

    arguments: dict[str, Any]
    documents: list[list[int]]
    padding: list[int] | None = None

    @property
    def input_ids(self) -> Tensor:
        chance = torch.Generator().manual_seed(len(self.documents) + self.documents[0][-1])
        shape = len(self.documents), self.documents[0][-1]
        return torch.randint(1, VOCABULARY, shape, generator=chance)

    @property
    def labels(self) -> Tensor:
        """As Hugging Face has them: unshifted, some left out."""
        labels = self.input_ids.clone()
        labels[:, 3:5] = -100
        return labels

    @property
    def real(self) -> Tensor:
        real = torch.ones_like(self.input_ids, dtype=torch.bool)
        for row, count in enumerate(self.padding or []):
            real[row, slice(-count, None) if count > 0 else slice(0, -count)] = False
        return real

    @property
    def targets(self) -> Tensor:
        """Document after document."""
        targets = torch.full_like(self.labels, -100)
        for row, starts in enumerate(self.documents):
            for a, b in pairwise(starts):
                targets[row, a : b - 1] = self.labels[row, a + 1 : b]
        return targets.masked_fill(~self.real, -100)

    @property
    def positions(self) -> Tensor:
        rows = [[i for a, b in pairwise(starts) for i in range(b - a)] for starts in self.documents]
        return torch.tensor(rows)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By a mask of tokens by tokens."""
        tokens = q.shape[1]
        sees = torch.zeros(len(q), 1, tokens, tokens, dtype=torch.bool)
        for row, starts in enumerate(self.documents):
            for a, b in pairwise(starts):
                sees[row, :, a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2)


def one_process(
    steps: list[list[WholeCase]], learning_rate: float, model: Model | None = None
) -> list[tuple[float, list[Tensor]]]:
    """Loss and gradients of each step, whose batches are those of all data-parallel ranks."""
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    results = []
    for cases in steps:
        optimizer.zero_grad()
        logits = [model(case.input_ids, case.positions, case.attention) for case in cases]
        flat = torch.cat([x.flatten(0, 1) for x in logits])
        loss = cross_entropy(flat, torch.cat([case.targets.flatten() for case in cases]))
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((loss.item(), grads))
        optimizer.step()
    return results
