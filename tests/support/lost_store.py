"""One rank of a job whose rank 0 keeps the key-value store and ends in mid-job: run by a test."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mesh_attention import ContextParallel, MeshAttentionError


def main(rank: int, size: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )
    cp = ContextParallel(seq_len=24, num_heads=2, head_dim=8, causal=True, dtype=torch.float32)
    x = torch.ones(1, cp.plan.q_layout.slots, 2, 8)
    cp.attention(x, x, x)
    if rank == 0:
        os._exit(1)
    try:
        cp.attention(x, x, x)
    except MeshAttentionError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
