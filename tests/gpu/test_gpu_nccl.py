"""NCCL, which takes one rank a GPU: start-up, both passes, and a warm call without the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mesh_attention import Mask
from support.cases import Case
from support.gloo_case import Part, attend, context, whole
from support.gpu_case import LIMIT, SECONDS, relative_errors, warm_call
from support.pool import WorkerPool
from support.reference import attention

pytestmark = pytest.mark.gpu


def case(dtype: torch.dtype) -> Case:
    """Causal with whole chunks, so that only kernels that need nothing from the host are asked."""
    return Case(1, 512, 512, heads=(8, 2), head_dims=(64, 64), mask=Mask(causal=True), dtype=dtype)


def one_rank(rank: int, world_size: int, case: Case) -> Part:
    with context(case, dist.new_group(backend="nccl")) as cp:
        assert dist.get_backend(cp._calls.session.groups.parent) == "nccl"
        return attend(cp, case, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_nccl_rank_equals_the_truth(gpu_pool: WorkerPool, dtype: torch.dtype) -> None:
    asked = case(dtype)
    parts = gpu_pool.run(one_rank, 1, asked, seconds=SECONDS)
    result = relative_errors(whole(parts, asked), attention(*asked.tensors(), asked.mask))
    assert max(result.values()) <= LIMIT[dtype]


def test_a_warm_call_over_nccl_never_stops_the_host(gpu_pool: WorkerPool) -> None:
    gpu_pool.run(warm_call, 1, case(torch.bfloat16), {}, "nccl", seconds=SECONDS)
