"""The blocks of docs/migration.md that are ours run as they stand, as on one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from support.pool import WorkerPool

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
TOKENS, HEADS, KV_HEADS, WIDTH, WORDS = 48, 4, 2, 8, 11
DOCUMENTS = [0, 5, 29, 30, TOKENS]
Q_RANGES, K_RANGES, KINDS = [(0, 16), (16, 48)], [(0, 16), (0, 48)], ["full", "causal"]


class Model(nn.Module):
    """One layer of attention on `attend(q, k, v)`, or over ranks with `cp`, and a head."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.names = names
        self.words = nn.Embedding(WORDS, HEADS * WIDTH)
        self.head = nn.Linear(HEADS * WIDTH, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, documents: Any) -> Tensor:
        x = self.words(input_ids).unflatten(-1, (HEADS, WIDTH))
        if documents is None:
            out = on_one_process(x, x, x, visible(DOCUMENTS))
        else:
            out = self.names["cp"].attention(x, x, x, documents=documents)
        logits: Tensor = self.head(out.flatten(-2))
        return logits


def visible(documents: list[int]) -> Tensor:
    rows = torch.arange(TOKENS)
    document = torch.bucketize(rows, torch.tensor(documents[1:]), right=True)
    return (document[:, None] == document) & (rows[:, None] >= rows)


def on_one_process(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


def blocks(section: str) -> list[str]:
    return re.findall(r'```python title="mesh_attention"\n(.*?)```', section, flags=re.DOTALL)


def errors_of_the_page(rank: int, world_size: int) -> dict[str, list[float]]:
    """By section: how far each block is from one process."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, TOKENS, h, WIDTH) for h in heads)
    input_ids = torch.randint(WORDS, (1, TOKENS))
    targets = input_ids.roll(-1, 1)
    targets[0, [cut - 1 for cut in DOCUMENTS[1:]]] = -100
    names: dict[str, Any] = {"group": dist.group.WORLD, "rank": rank, "world_size": world_size}
    names |= {"whole_q": q, "whole_k": k, "whole_v": v, "cu_seqlens": DOCUMENTS}
    names |= {"input_ids": input_ids, "targets": targets, "model": Model(names)}
    names |= {"q_ranges": Q_RANGES, "k_ranges": K_RANGES, "kinds": KINDS}
    errors: dict[str, list[float]] = {}
    objects = []
    for title, section in SECTIONS.items():
        for block in blocks(section):
            for name in ("docs", "mean"):
                names.pop(name, None)
            exec(block, names)
            errors.setdefault(title, []).append(error_of(block, names))
            objects.append(names["cp"])  # open to the end, so that they share process groups
    for cp in objects:
        cp.close()
    return errors


def error_of(block: str, names: dict[str, Any]) -> float:
    if "mean" in names:
        logits = Model(names)(names["input_ids"], None, None)
        loss = cross_entropy(logits.flatten(0, 1), names["targets"].flatten())
        return float((names["mean"].value - loss.detach()).abs())
    seen = visible(DOCUMENTS if "cu_seqlens" in block else [0, TOKENS])
    if "slices" in block:  # the first is full
        seen[:16, :16] = True
    wanted = on_one_process(names["whole_q"], names["whole_k"], names["whole_v"], seen)
    out = names["cp"].unshard(names["out"].detach(), 1, documents=names.get("docs"))
    return float((out - wanted).abs().max())


def test_every_block_of_ours_gives_the_numbers_of_one_process(pool: WorkerPool) -> None:
    for errors in pool.run(errors_of_the_page, 4):
        assert {title: len(found) for title, found in errors.items()} == {
            "ring-flash-attention": 2,
            "yunchang (long-context-attention)": 1,
            "PyTorch `context_parallel`": 1,
            "DeepSpeed Ulysses": 1,
            "Megatron-LM": 1,
            "MagiAttention": 1,
        }
        assert {title: found for title, found in errors.items() if max(found) > 1e-5} == {}
