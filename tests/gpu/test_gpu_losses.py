"""Losses in chunks on a GPU, where 16 bits are multiplied into float32: exact within their dtype,
on ranks over NCCL, and within their memory as the allocator counts it; by each kernel of losses."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mesh_attention import ContextParallel
from support.gpu_case import SECONDS
from support.head_case import error, true_loss
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

WIDTH, VOCABULARY, CHUNK = 256, 8192, 128
HOW: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0}


def losses(rank: int, world_size: int, name: str, tokens: int, kernel: Any) -> dict[str, float]:
    """Errors against float64, and the peak in units of what it may be."""
    dtype = getattr(torch, name)
    group = dist.new_group(backend="nccl")
    chance = torch.Generator("cuda").manual_seed(0)
    random: Any = torch.randn
    whole = random(tokens, WIDTH, generator=chance, device="cuda").to(dtype)
    weight = (random(VOCABULARY, WIDTH, generator=chance, device="cuda") / 16).to(dtype)
    labels = torch.randint(VOCABULARY, (tokens,), generator=chance, device="cuda")
    labels[::5] = -100
    bias = random(VOCABULARY, generator=chance, device="cuda").to(dtype)
    doubles = [x.double().requires_grad_() for x in (whole, weight, bias)]
    wanted = true_loss(doubles[0] @ doubles[1].T + doubles[2], labels, **HOW)
    wanted = wanted / (labels != -100).sum()
    true = torch.autograd.grad(wanted, doubles)
    local = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)
    hidden, *head = leaves = [x.requires_grad_() for x in (whole[local][None], weight, bias)]
    how: dict[str, Any] = {"reduce": "sum", "kernel": kernel}
    with ContextParallel(group, causal=True) as cp:
        loss = partial(cp.linear_cross_entropy, hidden, weight, labels[local][None], **how, **HOW)
        for mode in ("default", "error"):
            for leaf in leaves:
                leaf.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode(mode)  # "error": the host waits for nothing
            mean = loss(bias=bias, chunk_tokens=CHUNK)
            mean.loss.backward()  # type: ignore[no-untyped-call]
            torch.cuda.set_sync_debug_mode("default")
            peak = torch.cuda.max_memory_allocated() - before
        again = loss(bias=bias).loss  # in one chunk
        grads = [torch.autograd.grad(again, leaves, retain_graph=keep) for keep in (True, False)]
        cp.check()
        logits = (hidden @ weight.T + bias).detach().requires_grad_()
        other = cp.cross_entropy(logits, labels[local][None], **how)
        other.loss.backward()  # type: ignore[no-untyped-call]
        cp.check()
        assert dict(cp.kernels()["linear_cross_entropy"])[kernel] == "chosen"
    of_logits = logits.detach().double().requires_grad_()
    count = (labels != -100).sum()
    true_other = true_loss(of_logits[0], labels[local]) / count
    true_other.backward()  # type: ignore[no-untyped-call]
    dist.all_reduce(true_other := true_other.detach(), group=group)
    assert logits.grad is not None
    errors = {
        "value": (mean.value - wanted).abs().item(),
        "value of logits": (other.value - true_other).abs().item(),
        "logits": error(logits.grad, of_logits.grad),
        "second backward": max(map(error, *grads)),
        "in one chunk": max(error(a, b.grad) for a, b in zip(grads[0], leaves, strict=True)),
        "hidden": error(hidden.grad[0], true[0][local]),
    }
    for name, x, of in zip(("weight", "bias"), head, true[1:], strict=True):
        total = x.grad.float()
        dist.all_reduce(total, group=group)
        errors[name] = error(total, of)
    allowed = hidden.nbytes + 4 * VOCABULARY * (WIDTH + 2 * CHUNK)
    return errors | {"peak": peak / allowed}


@pytest.mark.parametrize("kernel", ["plain", "liger"])
@pytest.mark.parametrize(("name", "bound"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_losses_on_a_gpu_are_those_of_whole_logits_and_keep_their_memory(
    gpu_pool_in_turns: WorkerPool, name: str, bound: float, kernel: str
) -> None:
    if kernel == "liger" and find_spec("liger_kernel") is None:
        pytest.skip("liger_kernel is not installed")
    for ranks in (1, 2):
        for errors in gpu_pool_in_turns.run(losses, ranks, name, 4096, kernel, seconds=SECONDS):
            assert errors.pop("peak") <= 1.2
            assert max(errors.values()) < bound, errors
