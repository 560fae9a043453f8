"""`same_bits=True`: any number of ranks gives the bits of one rank, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError
from support.pool import WorkerPool

SIZES: dict[str, Any] = {"num_heads": 16, "head_dim": 8, "dtype": torch.float32}
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (64, 16, {"causal": True}),
    (613, 8, {"causal": True, "softcap": 20.0}),
    (257, 8, {"mask": Mask(causal=True, documents=(0, 5, 64, 190, 257))}),
]


def bits(rank: int, world_size: int) -> list[list[Tensor]]:
    """Whole results of both passes."""
    made = []
    for tokens, kv_heads, options in CASES:
        sizes = SIZES | {"seq_len": tokens, "num_kv_heads": kv_heads}
        with ContextParallel(same_bits=True, **sizes, **options) as cp:
            made.append(both_passes(cp, tokens, kv_heads))
    return made


def both_passes(cp: ContextParallel, tokens: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, heads, 8) for heads in (16, kv_heads, kv_heads, 16)]
    q, k, v, grad = (cp.shard(torch.randn(shape, generator=generator), 1) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves)
    assert isinstance(out, Tensor)
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return [cp.unshard(x, 1) for x in results]


def test_any_number_of_ranks_gives_the_bits_of_one(pool: WorkerPool) -> None:
    alone = pool.run(bits, 1)[0]
    for world_size in (2, 8):
        for rank, made in enumerate(pool.run(bits, world_size)):
            for case, (results, truth) in enumerate(zip(made, alone, strict=True)):
                for name, a, b in zip(("out", "dq", "dk", "dv"), results, truth, strict=True):
                    assert torch.equal(a, b), (world_size, rank, case, name)


def refusals(rank: int, world_size: int) -> list[str]:
    said = []
    for options in (
        {"method": "ring"},
        {"layout": "zigzag"},
        {"chunks": (2, 1)},
        {"relayout": True},
        {"num_kv_heads": 1},
        {"window_size": (37, 0)},
        {"mask": Mask(causal=True, prefix=16), "causal": None},
    ):
        with pytest.raises(MeshAttentionError) as raised:
            ContextParallel(**({"seq_len": 64, "causal": True} | SIZES | options), same_bits=True)
        said.append(str(raised.value))
    with ContextParallel(same_bits=True, method="ulysses", seq_len=64, causal=True, **SIZES) as cp:
        with pytest.raises(MeshAttentionError) as raised:
            cp.documents([0, 5, 64])
        said.append(str(raised.value))
        both_passes(cp, 64, 16)  # what is refused leaves the group as it was
    return said


def test_whatever_would_change_bits_is_refused_by_name(pool: WorkerPool) -> None:
    for said in pool.run(refusals, 2):
        names = (
            "method",
            "layout",
            "chunks",
            "relayout",
            "num_kv_heads",
            "window",
            "prefix",
            "documents",
        )
        assert all(
            words.startswith("same_bits=True") and name in words
            for words, name in zip(said, names, strict=True)
        ), said
