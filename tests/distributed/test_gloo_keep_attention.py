"""Checkpoints that keep attention: the bits of a block without any checkpoint, and a forward pass
that communicates once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mesh_attention import ContextParallel, MeshAttentionError
from mesh_attention.train.keep_attention import KeepAttention
from support.gloo_case import handed_bytes
from support.pool import WorkerPool
from support.transformer_block import Compiled

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 32
WIDTH = HEADS * HEAD_DIM
SIZES = {"seq_len": TOKENS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
Run = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.split = [HEADS, KV_HEADS, KV_HEADS]
        self.qkv = nn.Linear(WIDTH, sum(self.split) * HEAD_DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())

    def forward(self, x: Tensor, angles: Tensor, documents: Any = None) -> Tensor:
        q, k, v = (self.qkv(x).unflatten(-1, (-1, HEAD_DIM)) * angles).split(self.split, dim=2)
        seen = self.cp.attention(q, k, v, documents=documents)
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


def blocks_of(cp: ContextParallel) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(cp) for _ in range(3))


def trained(cp: ContextParallel, run: Run, blocks: Any, *, documents: Any = None) -> list[Tensor]:
    """Two steps of two batches each, whose forward passes come before their backward passes: the
    outputs, and the gradients of all parameters."""
    torch.manual_seed(1)  # of dropout too
    found = []
    for _ in range(2):
        outs = []
        for _ in range(2):
            shard = cp.shard(torch.randn(2 - (documents is not None), TOKENS, WIDTH), 1, **(
                {} if documents is None else {"documents": documents}))
            x, angles = shard.requires_grad_(), torch.rand(HEAD_DIM)
            for block in blocks:
                x = run(block, x, angles, documents)
            outs.append(x)
        for out in outs:
            out.square().sum().backward()  # type: ignore[no-untyped-call]
        found += [out.detach().clone() for out in outs]
        for parameter in blocks.parameters():
            found.append(parameter.grad)
            parameter.grad = None
    return found


def moved(cp: ContextParallel, run: Run, **how: Any) -> tuple[list[Tensor], dict[str, int]]:
    """What `trained` gives, and the bytes that were received for it in each pass."""
    def total() -> dict[str, int]:
        handed = handed_bytes(cp)
        return {name: sum(r for _, r in kinds.values()) for name, kinds in handed.items()}

    before = total()
    found = trained(cp, run, blocks_of(cp), **how)
    return found, {name: n - before.get(name, 0) for name, n in total().items()}


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def in_every_kind(rank: int, world_size: int, options: dict[str, Any], packed: bool) -> list[str]:
    """What is wrong."""
    wrong = []
    documents: Any = None
    with ContextParallel(**options) as cp, ContextParallel(**options, keep="shards") as shards:
        documents = cp.documents([0, 9, TOKENS]) if packed else None
        wanted, usual = moved(cp, plain, documents=documents)
        found, once = moved(shards, plain, documents=shards.documents([0, 9, TOKENS]) if packed else None)
        assert equal(wanted, found)
        keep, host = cp.keep_attention(), cp.keep_attention(offload=True)
        capped = cp.keep_attention(offload=True, host_bytes=20000)
        ways = {
            "kept": partial(not_reentrant, keep),
            "offloaded": partial(not_reentrant, host),
            "capped": partial(not_reentrant, capped),
            "reentrant": partial(reentrant, keep),
            "reentrant, offloaded": partial(reentrant, cp.keep_attention(offload=True)),
        }  # fmt: skip
        for name, run in ways.items():
            found, received = moved(cp, run, documents=documents)
            if not equal(wanted, found):
                wrong.append(f"{name}: other bits")
            if received != once:
                wrong.append(f"{name}: received {received}, not {once}")
        _, twice = moved(cp, partial(not_reentrant, None), documents=documents)
        if twice["forward"] != 2 * usual["forward"]:
            wrong.append(f"an ordinary checkpoint: {twice} and {once}")
    return wrong


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [
    {"causal": True, "method": "ulysses", **SIZES},
    {"causal": True, "method": "mesh"},
    {"causal": True},
])
def test_kept(pool: WorkerPool, options: dict[str, Any], packed: bool) -> None:
    assert pool.run(in_every_kind, 2, options, packed) == [[]] * 2
