"""A job whose rank 0 keeps the key-value store and ends in mid-job: run by a test.

What each other rank is told is a line of the output. Ranks are forked: torch is imported once.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from mesh_attention import ContextParallel, MeshAttentionError


def one_rank(rank: int, size: int, port: int) -> None:
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
        told = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(1, f"{told}\n".encode())  # at once: two ranks share the output


def main(size: int, port: int) -> None:
    torch.set_num_threads(1)
    for rank in range(size):
        if os.fork() == 0:
            try:
                one_rank(rank, size, port)
            finally:
                sys.stderr.flush()
                os._exit(0)
    for _ in range(size):
        os.wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
