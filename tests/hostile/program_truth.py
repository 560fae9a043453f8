"""What a program's numbers must be, from whole batches and attention by its definition."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hostile.program import Instruction, Program
from mesh_attention import Mask
from support.reference import Attention, attention

__all__ = ["CLASSES", "HEADS", "HEAD_DIM", "IGNORED", "WINDOW", "Truth"]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CLASSES, VOCABULARY = 11, 64
WINDOW = 5
IGNORED = -100


class Truth:
    """Tensors are looked up by the ids of a batch, in tables that all ranks have."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.dtype = {"float64": torch.float64, "float32": torch.float32}[program.dtype]
        self.attention = cache(self._attention)

    def drawn(self, name: str, *shape: int) -> Tensor:
        number = hash((self.program.seed, *name.encode())) % (1 << 40)
        chance = torch.Generator().manual_seed(number)
        return torch.randn(shape, generator=chance, dtype=torch.float64)

    def ids(self, batch: int) -> Tensor:
        """(rows, tokens)"""
        chance = torch.Generator().manual_seed(self.program.seed + 1 + batch)
        shape = (self.program.rows, self.program.documents[batch][-1])
        return torch.randint(VOCABULARY, shape, generator=chance)

    def qkv(self, layer: int, ids: Tensor) -> list[Tensor]:
        """Of ids that are whole or one rank's."""
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        tables = (self.drawn(f"{x} {layer}", VOCABULARY, heads[x], HEAD_DIM) for x in heads)
        return [table[ids].to(self.dtype) for table in tables]

    def grad_out(self, batch: int, layer: int) -> Tensor:
        tokens = self.program.documents[batch][-1]
        name = f"gradient {batch} {layer}"
        return self.drawn(name, self.program.rows, tokens, HEADS, HEAD_DIM).to(self.dtype)

    def mask(self, batch: int, layer: int) -> Mask:
        window = (WINDOW, 0) if layer in self.program.windowed else None
        return Mask(causal=True, window=window, documents=self.program.documents[batch])

    def _attention(self, batch: int, layer: int) -> Attention:
        q, k, v = self.qkv(layer, self.ids(batch))
        return attention(q, k, v, self.grad_out(batch, layer), self.mask(batch, layer))

    def logits(self, ids: Tensor) -> Tensor:
        return self.drawn("logits", VOCABULARY, CLASSES)[ids]

    def labels(self, batch: int) -> Tensor:
        return self.ids(batch) % CLASSES

    def targets(self, batch: int) -> Tensor:
        """The label of the next token; none at the end of a document."""
        labels = self.labels(batch)
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        for end in self.program.documents[batch][1:]:
            targets[:, end - 1] = IGNORED
        return targets

    def losses(self, batch: int) -> Tensor:
        """(rows, tokens), 0 where there is no target."""
        logits, targets = self.logits(self.ids(batch)), self.targets(batch)
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(targets.shape)

    def label(self, each: Instruction) -> str | None:
        kinds = {"": None, "layer": str(each.layer), "step": f"{each.step}.{each.layer}"}
        return kinds[self.program.labels]
