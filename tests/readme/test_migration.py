"""The blocks of docs/migration.md run: ours as on one process, peers' with their signatures."""

from __future__ import annotations

import re
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import experimental
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from support.peers import VERSIONS, stub_modules
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


def blocks(section: str, ours: bool = True) -> list[str]:
    texts = re.findall(r'```python title="(.*?)"\n(.*?)```', section, flags=re.DOTALL)
    return [block for title, block in texts if (title == "mesh_attention") == ours]


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
        assert {title: len(result) for title, result in errors.items()} == {
            "ring-flash-attention": 2,
            "yunchang (long-context-attention)": 1,
            "PyTorch `context_parallel`": 1,
            "DeepSpeed Ulysses": 1,
            "Megatron-LM": 1,
            "MagiAttention": 1,
        }
        assert {title: result for title, result in errors.items() if max(result) > 1e-5} == {}


def names_of_peers(modules: dict[str, Any]) -> dict[str, Any]:
    """What the peers' blocks use without making it."""
    q = torch.zeros(1, HEADS, TOKENS, WIDTH)
    ids = torch.zeros(1, TOKENS)
    parts = ("tokens", "position_ids", "labels", "loss_mask")
    unused = "group mesh flash_attention x local_q local_k local_v q_ranges k_ranges attn_mask_type"
    names: dict[str, Any] = dict.fromkeys(unused.split())
    names |= {"q": q, "k": q, "v": q, "rank": 0, "world_size": 4, "tokens": TOKENS}
    names |= {"cu_seqlens": DOCUMENTS, "batch": dict.fromkeys(parts, ids)}
    return names | {"model": modules["megatron.core.models.gpt.gpt_model"].GPTModel()}


def run_of_peers(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stub_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    parameters = signature(experimental.context_parallel)

    class Block:
        def __init__(self, *args: Any, **options: Any) -> None:
            parameters.bind(*args, **options)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(experimental, "context_parallel", Block)
    exec(block, names_of_peers(modules))


@pytest.mark.parametrize("title", SECTIONS)
def test_every_block_of_a_peer_fits_the_signatures_of_the_version_on_the_page(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = SECTIONS[title]
    if title in VERSIONS:
        assert f"{VERSIONS[title]}." in section.partition("```")[0]
    theirs = blocks(section, ours=False)
    assert len(theirs) == len(blocks(section))
    for block in theirs:
        run_of_peers(block, monkeypatch)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("group=group)", "process_group=group)"),
        ("import zigzag_ring_flash_attn_func", "import zigzag_ring_attention"),
        (", batch_dim_idx=0", ""),
        ("mesh, buffers=", "mesh, tensors="),
    ],
)
def test_a_call_that_a_peer_does_not_have_is_seen(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [block for section in SECTIONS.values() for block in blocks(section, ours=False)]
    block = next(block for block in theirs if right in block)
    with pytest.raises((TypeError, ImportError)):
        run_of_peers(block.replace(right, wrong), monkeypatch)
