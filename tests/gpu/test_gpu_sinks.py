"""Attention sinks on a GPU: fused row kernels, a captured call, and a step without the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import Mask
from support.cases import Case
from support.gloo_case import context
from support.gpu_case import SECONDS
from support.pool import WorkerPool
from support.sink_reference import NAMES, attention_with_sinks, distances

pytestmark = pytest.mark.gpu

CASE = Case(
    1, 500, 500, heads=(8, 2), head_dims=(64, 64), mask=Mask(causal=True), dtype=torch.bfloat16
)
SINKS = torch.linspace(-2.0, 6.0, 8)


def one_rank(rank: int, world_size: int, cuda_graph: bool) -> dict[str, Tensor]:
    with context(CASE, dist.new_group(backend="nccl"), cuda_graph=cuda_graph) as cp:
        q, k, v, grad_out = (cp.shard(x.cuda(), 1) for x in CASE.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v, SINKS.cuda())]
        results: list[tuple[Tensor, ...]] = []
        for step in range(3):
            if step == 2:  # everything is made: nothing may wait for the device
                torch.cuda.set_sync_debug_mode("error")
            out, lse = cp.attention(*leaves[:3], sinks=leaves[3], return_lse=True)
            results.append((out, lse, *torch.autograd.grad(out, leaves, grad_out)))
        torch.cuda.set_sync_debug_mode("default")
        cp.check()
        real = ~cp.padding()
        out, lse, *grads = (x.detach().cpu() for x in results[-1])
        kept = (out[:, real], lse[..., real], *(x[:, real] for x in grads[:3]), grads[3])
        return dict(zip(NAMES, kept, strict=True))


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_sinks_on_a_gpu_equal_the_truth(gpu_pool: WorkerPool, cuda_graph: bool) -> None:
    (results,) = gpu_pool.run(one_rank, 1, cuda_graph, seconds=SECONDS)
    errors = distances(results, attention_with_sinks(CASE.tensors(), SINKS, CASE.mask))
    assert max(errors.values()) <= 0.02, errors
