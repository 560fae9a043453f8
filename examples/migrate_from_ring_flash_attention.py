"""Attention as users of ring-flash-attention write it, and the same as it is written here.

    torchrun --nproc-per-node 4 examples/migrate_from_ring_flash_attention.py
    srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 \
        --rdzv-backend c10d --rdzv-endpoint $(hostname):29500 \
        examples/migrate_from_ring_flash_attention.py

Two functions here have the names and arguments of that library and are a few lines of plain
PyTorch, so that it need not be installed. Outputs and gradients of both ways are compared: zigzag
shards, packed documents; and documents of any length, which the first way does not take. On CPU by
gloo, in seconds; on GPUs by NCCL.
"""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32
Way = Callable[[list[Tensor], Tensor, list[int]], list[Tensor]]


# The way there. A program has these two by `from ring_flash_attn import ...`.


def zigzag_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return slow_attention(q, k, v, [0, q.shape[1] * dist.get_world_size()], causal)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool
) -> Tensor:
    """Without a batch dimension; lengths are those of a rank."""
    assert max_seqlen == cu_seqlens.diff().max()
    starts = (cu_seqlens * dist.get_world_size()).tolist()
    return slow_attention(q[None], k[None], v[None], starts, causal)[0]


def zigzag_there(whole: list[Tensor], grad: Tensor, starts: list[int]) -> list[Tensor]:
    """Every rank cuts two pieces out of the sequence, which must have twice as many as ranks."""
    own_rows = zigzag(starts, dist.get_rank())
    q, k, v = local = [x[:, own_rows].requires_grad_() for x in whole]
    out = zigzag_ring_flash_attn_func(q, k, v, causal=True)
    return joined([out, *torch.autograd.grad(out, local, grad[:, own_rows])], starts)


def documents_there(whole: list[Tensor], grad: Tensor, starts: list[int]) -> list[Tensor]:
    """The same of every document; lengths are divided by the ranks, too."""
    own_rows = zigzag(starts, dist.get_rank())
    q, k, v = local = [x[0, own_rows].requires_grad_() for x in whole]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32) // dist.get_world_size()
    longest = int(cu_seqlens.diff().max())
    out = zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, longest, causal=True)
    results = [out, *torch.autograd.grad(out, local, grad[0, own_rows])]
    return joined([x[None] for x in results], starts)


# The way here.


def zigzag_here(whole: list[Tensor], grad: Tensor, starts: list[int]) -> list[Tensor]:
    with ContextParallel(seq_len=starts[-1], causal=True, layout="zigzag") as cp:
        q, k, v = local = [cp.shard(x, dim=1).requires_grad_() for x in whole]
        out = cp.attention(q, k, v)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, local, cp.shard(grad, dim=1))
        return [cp.unshard(x.detach(), dim=1) for x in (out, *grads)]


def documents_here(whole: list[Tensor], grad: Tensor, starts: list[int]) -> list[Tensor]:
    with ContextParallel(causal=True) as cp:
        docs = cp.documents(starts)  # once a batch; `shard_batch` cuts labels and ids too
        q, k, v = local = [cp.shard(x, 1, documents=docs).requires_grad_() for x in whole]
        out = cp.attention(q, k, v, documents=docs)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, local, cp.shard(grad, 1, documents=docs))
        return [cp.unshard(x.detach(), 1, documents=docs) for x in (out, *grads)]


# What both are compared with, and what the way there needs.


def zigzag(starts: Sequence[int], rank: int) -> Tensor:
    """The tokens of a rank: of each document a piece from the front and one from the back."""
    pieces, own = 2 * dist.get_world_size(), []
    for a, b in pairwise(starts):
        if (b - a) % pieces:
            raise ValueError(f"a document of {b - a} tokens cannot be cut into {pieces} pieces")
        rows = torch.arange(a, b).chunk(pieces)
        own += [rows[rank], rows[pieces - 1 - rank]]
    return torch.cat(own)


def joined(shards: list[Tensor], starts: Sequence[int]) -> list[Tensor]:
    order = torch.cat([zigzag(starts, rank) for rank in range(dist.get_world_size())]).argsort()
    return [torch.cat(all_gather(x.detach().contiguous()), dim=1)[:, order] for x in shards]


def slow_attention(q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], causal: bool) -> Tensor:
    assert causal
    keys = torch.cat([zigzag(starts, rank) for rank in range(dist.get_world_size())])
    k, v = (torch.cat(all_gather(x.contiguous()), dim=1) for x in (k, v))
    return masked_attention(q, k, v, starts, zigzag(starts, dist.get_rank()), keys)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], queries: Tensor, keys: Tensor
) -> Tensor:
    document = torch.bucketize(torch.arange(starts[-1]), torch.tensor(starts[1:]), right=True)
    sees = (document[queries][:, None] == document[keys]) & (queries[:, None] >= keys)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=sees.to(q.device), enable_gqa=True)
    return out.transpose(1, 2)


def on_one_process(whole: list[Tensor], grad: Tensor, starts: list[int]) -> list[Tensor]:
    q, k, v = leaves = [x.clone().requires_grad_() for x in whole]
    rows = torch.arange(starts[-1])
    out = masked_attention(q, k, v, starts, rows, rows)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(what: str, device: torch.device, starts: list[int], *ways: Way) -> None:
    torch.manual_seed(0)  # the same on all ranks
    q, k, v, grad = (
        torch.randn(1, starts[-1], heads, HEAD_DIM, device=device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    wanted = on_one_process([q, k, v], grad, starts)
    for way in ways:
        results = way([q, k, v], grad, starts)
        error = max(float((a - b).abs().max()) for a, b in zip(results, wanted, strict=True))
        if dist.get_rank() == 0:
            print(f"{what}, {way.__name__}: error of output and gradients {error:.1e}")
        assert error < 1e-4, error


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(f"torchrun starts it: torchrun --nproc-per-node 4 {__file__}")
    # A GPU for each process, or none at all.
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    piece = 2 * dist.get_world_size()
    compare("one sequence", device, [0, 32 * piece], zigzag_there, zigzag_here)
    divisible = [0, 8 * piece, 24 * piece, 32 * piece]
    compare("documents", device, divisible, documents_there, documents_here)
    compare("documents of any length", device, [0, 3, 101, 102, 32 * piece], documents_here)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
