"""Losses in chunks on a GPU, where 16 bits are multiplied into float32: exact within their dtype,
on ranks over NCCL, and within their memory as the allocator counts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from mesh_attention import ContextParallel
from support.gpu_case import SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

WIDTH, VOCABULARY, CHUNK = 256, 8192, 128


def losses(rank: int, world_size: int, name: str, tokens: int) -> dict[str, float]:
    """Errors against float64, and the peak in units of what it may be."""
    dtype = getattr(torch, name)
    group = dist.new_group(backend="nccl")
    chance = torch.Generator("cuda").manual_seed(0)
    random: Any = torch.randn
    whole = random(tokens, WIDTH, generator=chance, device="cuda").to(dtype)
    weight = (random(VOCABULARY, WIDTH, generator=chance, device="cuda") / 16).to(dtype)
    labels = torch.randint(VOCABULARY, (tokens,), generator=chance, device="cuda")
    labels[::5] = -100
    doubles = [x.double().requires_grad_() for x in (whole, weight)]
    wanted = functional.cross_entropy(doubles[0] @ doubles[1].T, labels)
    true = torch.autograd.grad(wanted, doubles)
    local = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)
    hidden, weight = whole[local][None].requires_grad_(), weight.requires_grad_()
    with ContextParallel(group, causal=True) as cp:
        for _ in range(2):
            hidden.grad = weight.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            mean = cp.linear_cross_entropy(
                hidden, weight, labels[local][None], reduce="sum", chunk_tokens=CHUNK
            )
            mean.loss.backward()  # type: ignore[no-untyped-call]
            peak = torch.cuda.max_memory_allocated() - before
        cp.check()
        logits = (hidden @ weight.T).detach().requires_grad_()
        other = cp.cross_entropy(logits, labels[local][None], reduce="sum")
        cp.check()
    assert hidden.grad is not None
    assert weight.grad is not None
    total = weight.grad.float()
    dist.all_reduce(total, group=group)
    allowed = hidden.nbytes + 4 * VOCABULARY * (WIDTH + 2 * CHUNK)
    return {
        "value": (mean.value - wanted).abs().item(),
        "value of logits": (other.value - wanted).abs().item(),
        "hidden": ((hidden.grad[0] - true[0][local]).abs().max() / true[0].abs().max()).item(),
        "weight": ((total - true[1]).abs().max() / true[1].abs().max()).item(),
        "peak": peak / allowed,
    }


@pytest.mark.parametrize(("name", "bound"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_losses_on_a_gpu_are_those_of_whole_logits_and_keep_their_memory(
    gpu_pool_in_turns: WorkerPool, name: str, bound: float
) -> None:
    for ranks in (1, 2):
        for errors in gpu_pool_in_turns.run(losses, ranks, name, 4096, seconds=SECONDS):
            assert errors.pop("peak") <= 1.2
            assert max(errors.values()) < bound, errors
