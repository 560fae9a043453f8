"""`same_bits=True` on a GPU: ranks over NCCL give the bits of one rank, in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel, Mask
from support.gpu_case import SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 64}


def bits(rank: int, world_size: int) -> list[Tensor]:
    made = []
    group = dist.new_group(backend="nccl")
    for tokens, mask in (
        (300, Mask(causal=True)),
        (1024, Mask(causal=True)),
        (3000, Mask()),
        (8192, Mask(causal=True)),
        (3000, Mask(causal=True, documents=(0, 5, 900, 1411, 3000))),
    ):
        with ContextParallel(group, same_bits=True, seq_len=tokens, mask=mask, **SIZES) as cp:
            generator = torch.Generator(device="cuda").manual_seed(tokens)
            whole = (
                torch.randn(
                    (1, tokens, heads, 64),
                    generator=generator,
                    device="cuda",
                    dtype=torch.bfloat16,
                )
                for heads in (16, 8, 8, 16)
            )
            q, k, v, grad = (cp.shard(x, 1) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = cp.attention(*leaves)
            assert isinstance(out, Tensor)
            results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
            made += [cp.unshard(x, 1).cpu() for x in results]
    return made


def test_ranks_over_nccl_give_the_bits_of_one(gpu_pool: WorkerPool) -> None:
    alone = gpu_pool.run(bits, 1, seconds=SECONDS)[0]
    for world_size in (2, 4):
        for made in gpu_pool.run(bits, world_size, seconds=SECONDS):
            same = [torch.equal(a, b) for a, b in zip(made, alone, strict=True)]
            assert all(same), (world_size, same)
