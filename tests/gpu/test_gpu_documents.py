"""New documents at every step on several NCCL ranks: exact, and the host never waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import ContextParallel
from support.gpu_case import COMPILES_SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 4, 64
PACKS = [
    [0, 100, 512],
    [0, 512],
    [0, 7, 8, 300, 512],
    [0, 256, 640],
    [0, 30, 60, 90, 500],
    [0, 411, 512],
]


def tensors(starts: list[int]) -> list[Tensor]:
    chance = torch.Generator().manual_seed(sum(starts))
    shapes = [HEADS, KV_HEADS, KV_HEADS, HEADS]
    whole = [torch.randn(1, starts[-1], heads, DIM, generator=chance) for heads in shapes]
    return [x.bfloat16() for x in whole]


def truth(starts: list[int], whole: list[Tensor]) -> list[Tensor]:
    """Out and gradients in float64, document after document."""
    leaves = [x.double().requires_grad_() for x in whole[:3]]
    outs = []
    for a, b in pairwise(starts):
        q, k, v = (x[:, a:b].transpose(1, 2) for x in leaves)
        attend = torch.nn.functional.scaled_dot_product_attention
        outs.append(attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]


OF_ONE_LENGTH = [[0, cut, 512] for cut in (100, 500, 1, 256, 77, 300)]


def steps(
    cp: ContextParallel, packs: list[list[int]], ahead: bool
) -> Iterator[tuple[list[int], Any]]:
    if ahead:
        yield from cp.prefetch(packs, lambda starts: starts)
    else:
        yield from ((starts, cp.documents(starts)) for starts in packs)


def errors(
    rank: int, world_size: int, changes: dict[str, Any], ahead: bool, no_wait: bool
) -> list[float]:
    group = dist.new_group(backend="nccl")
    results: list[float] = []
    packs = OF_ONE_LENGTH if no_wait else PACKS
    with ContextParallel(group, causal=True, **changes) as cp:
        on_device = {tuple(starts): [x.cuda() for x in tensors(starts)] for starts in packs}
        for step, (starts, docs) in enumerate(steps(cp, packs, ahead)):
            whole = on_device[tuple(starts)]
            q, k, v, grad = (cp.shard(x, 1, documents=docs) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            torch.cuda.synchronize()
            busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
            if no_wait:
                torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # a second
            busy.record()
            out = cp.attention(*leaves, documents=docs)
            assert isinstance(out, Tensor)
            grads = torch.autograd.grad(out, leaves, grad)
            waited = busy.query()  # type: ignore[no-untyped-call]
            if no_wait and step >= 3 and waited:
                results.append(torch.inf)
            torch.cuda.synchronize()
            cp.check()
            wanted = truth(starts, tensors(starts))
            for own, whole_one in zip((out.detach(), *grads), wanted, strict=True):
                right = cp.shard(whole_one, 1, documents=docs)
                distance = (own.cpu().double() - right).norm() / whole_one.norm()
                results.append(float(distance))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"layout": "contiguous"}, {"method": "seen"}, {"method": "mesh"}], ids=repr
)
def test_new_documents_at_every_step_equal_the_truth(
    gpu_pool: WorkerPool, ranks: int, changes: dict[str, Any]
) -> None:
    for result in gpu_pool.run(errors, ranks, changes, False, False, seconds=COMPILES_SECONDS):
        assert max(result) < 1e-2


def test_documents_made_ready_ahead_equal_the_truth(gpu_pool: WorkerPool) -> None:
    for result in gpu_pool.run(errors, 2, {}, True, False, seconds=COMPILES_SECONDS):
        assert max(result) < 1e-2


@pytest.mark.parametrize("kernel", ["triton", None])
def test_the_host_never_waits_for_the_device_with_documents_made_ahead(
    gpu_pool: WorkerPool, kernel: str | None
) -> None:
    arguments = {"method": "ulysses", "kernel": kernel}
    for result in gpu_pool.run(errors, 2, arguments, True, True, seconds=COMPILES_SECONDS):
        assert max(result) < 1e-2
