"""One attention step, forward and backward, on a sequence that is split over ranks.

    torchrun --nproc-per-node 4 examples/one_step.py
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 examples/one_step.py

Every rank draws the same whole tensors, keeps its own tokens of them, and attends to all others
through `ContextParallel`. Afterwards the whole result is compared with PyTorch on one process.
On CPU by gloo, in seconds; on GPUs by NCCL.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 1000, 8, 2, 64


def on_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own attention; it wants (batch, heads, tokens, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(f"torchrun starts it: torchrun --nproc-per-node 4 {__file__}")
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)  # the same on all ranks
    q, k, v, grad = (
        torch.randn(1, TOKENS, heads, HEAD_DIM, device=device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )

    with ContextParallel(
        seq_len=TOKENS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        causal=True,
        dtype=torch.float32,
    ) as cp:
        local = [cp.shard(x, dim=1).requires_grad_() for x in (q, k, v)]
        out = cp.attention(*local)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, local, cp.shard(grad, dim=1))
        results = [cp.unshard(x, dim=1) for x in (out.detach(), *grads)]
        method = cp.plan.method  # chosen for these sizes; cp.choice says how
        received = sum(counters.total.received_bytes for counters in cp.traffic.values())

    whole = [x.requires_grad_() for x in (q, k, v)]
    true = on_one_process(*whole)
    truth = [true.detach(), *torch.autograd.grad(true, whole, grad)]
    errors = [(x - y).abs().max().item() for x, y in zip(results, truth, strict=True)]
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    print(f"{rank}: {method}, {received / 2**20:.2f} MiB received, error {max(errors):.1e}")
    assert max(errors) < 1e-4, errors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
