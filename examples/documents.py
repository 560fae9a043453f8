"""Packed documents that are new in every step, as training data come.

    torchrun --nproc-per-node 4 examples/documents.py
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/documents.py

Every step packs other documents, of another length in all. What is chosen for a pack is printed: a
few long documents, many short ones, a window. Each result is compared with PyTorch on one process.
On CPU by gloo, in seconds; on GPUs by NCCL.
"""

import os
import random
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

HEADS, KV_HEADS, HEAD_DIM, STEPS = 8, 2, 32, 4


def packs() -> list[list[int]]:
    """Cumulative starts of the documents of each step, the same on all ranks."""
    chance = random.Random(0)
    steps = []
    for step in range(STEPS):
        starts = [0]
        while len(starts) < (3 if step % 2 else 40):
            starts.append(
                starts[-1] + round(chance.lognormvariate(0, 1) * (400 if step % 2 else 20))
            )
        steps.append(starts)
    return steps


def on_one_process(whole: list[Tensor], starts: list[int]) -> Tensor:
    outs = []
    for a, b in pairwise(starts):
        q, k, v = (x[:, a:b].transpose(1, 2) for x in whole)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, dim=1)


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(f"torchrun starts it: torchrun --nproc-per-node 4 {__file__}")
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    with ContextParallel(causal=True) as cp:  # sizes come with the tensors
        for step, (starts, docs) in enumerate(cp.prefetch(packs(), lambda starts: starts)):
            torch.manual_seed(step)  # the same on all ranks
            whole = [
                torch.randn(1, starts[-1], heads, HEAD_DIM, device=device)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            q, k, v = (cp.shard(x, dim=1, documents=docs) for x in whole)
            out = cp.attention(q, k, v, documents=docs)
            assert isinstance(out, Tensor)
            result = cp.unshard(out, dim=1, documents=docs)
            error = (result - on_one_process(whole, starts)).abs().max().item()
            if dist.get_rank() == 0:
                print(f"step {step}: {docs}")
                print(f"        error {error:.1e}")
            assert error < 1e-4, error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
