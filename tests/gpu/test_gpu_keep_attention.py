"""Checkpoints that keep attention on GPUs: the bits of blocks without any, over several steps, and
the memory that was promised, with copies to the host beside computation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mesh_attention import ContextParallel
from support.checkpointed_blocks import Block, Run, equal, not_reentrant, plain, reentrant
from support.gpu_case import SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

MIB, BLOCKS, STEPS, TOKENS, HEADS = 2**20, 8, 3, 16384, (16, 8, 64)
WIDTH = HEADS[0] * HEADS[2]


def trained(cp: ContextParallel, run: Run, blocks: Any) -> tuple[list[torch.Tensor], int]:
    """Outputs and gradients of all steps, and the most memory of the last one."""
    torch.manual_seed(1)
    results = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        whole = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        x = cp.shard(whole, 1).requires_grad_() * 1
        angles = torch.rand(HEADS[2], device="cuda", dtype=torch.bfloat16)
        del whole
        for block in blocks:
            x = run(block, x, angles)
        x.float().square().mean().backward()  # type: ignore[no-untyped-call]
        most = torch.cuda.max_memory_allocated()
        results += [x.detach().cpu(), *(p.grad.cpu() for p in blocks.parameters())]
        blocks.zero_grad()
    cp.check()
    return results, most


def in_every_way(rank: int, world_size: int) -> tuple[list[str], dict[str, int]]:
    """What is wrong, and the memory of each way."""
    wrong, most = [], {}
    group = dist.new_group(backend="nccl")
    sizes: dict[str, Any] = {"seq_len": TOKENS, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
    with ContextParallel(
        group,
        causal=True,
        method="ulysses",
        deterministic=True,
        **sizes,
    ) as cp:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(cp, HEADS, dropout=0.1) for _ in range(BLOCKS))
        blocks.to(device="cuda", dtype=torch.bfloat16)
        offloading = cp.keep_attention(offload=True)
        host = offloading.host
        assert host is not None
        ways: dict[str, Run] = {
            "none": plain,
            "again": partial(not_reentrant, None),
            "kept": partial(not_reentrant, cp.keep_attention()),
            "offloaded": partial(not_reentrant, offloading),
            "capped": partial(not_reentrant, cp.keep_attention(offload=True, host_bytes=40 * MIB)),
            "reentrant": partial(reentrant, cp.keep_attention(offload=True)),
        }
        wanted, _ = trained(cp, plain, blocks)
        for name, run in ways.items():
            result, most[name] = trained(cp, run, blocks)
            if not equal(wanted, result):
                wrong.append(f"{name}: other bits")
        if host.num_bytes or host.stayed_bytes:
            wrong.append(f"{host.num_bytes} bytes are left, {host.stayed_bytes} stayed")
        for block in blocks:
            block.mlp.forward = cp.tiled(block.mlp.forward, tokens=1024)  # type: ignore[union-attr]
        once, most["tiled"] = trained(cp, ways["offloaded"], blocks)
        again, _ = trained(cp, plain, blocks)
        if not equal(once, again):
            wrong.append("in tiles: other bits")
    return wrong, most


def test_blocks_that_keep_attention_have_the_same_bits_in_less_memory(gpu_pool: WorkerPool) -> None:
    """Of 8 blocks that each leave their input and out, 16 MiB each."""
    for wrong, most in gpu_pool.run(in_every_way, 2, seconds=4 * SECONDS):
        shown = {name: size // MIB for name, size in most.items()}
        assert wrong == [], shown
        assert most["again"] < most["kept"] < most["none"] - BLOCKS * 64 * MIB, shown
        assert most["offloaded"] < most["kept"] - 32 * MIB, shown  # 783 for 830 on an H200
        assert most["offloaded"] <= most["capped"] <= most["kept"], shown
        assert most["tiled"] < most["offloaded"], shown
