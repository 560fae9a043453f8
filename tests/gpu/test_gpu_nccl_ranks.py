"""Many NCCL ranks on one GPU: every method, both passes, graphs, and several nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from mesh_attention import Mask
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case
from support.gloo_case import Part, attend, context, whole
from support.gpu_case import LIMIT, SECONDS, check, relative_errors
from support.pool import WorkerPool
from support.reference import attention

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float32)


def case(ranks: int, dtype: torch.dtype, tokens: int = 509) -> Case:
    """Causal, fewer KV heads than query heads, and a length that no number of ranks divides."""
    return Case(
        *(ranks, tokens, tokens),
        heads=(16, 8),
        head_dims=(64, 64),
        batch=2,
        mask=Mask(causal=True),
        dtype=dtype,
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_method_over_nccl_equals_the_truth(
    gpu_pool: WorkerPool, dtype: torch.dtype, ranks: int
) -> None:
    cases = [replace(case(ranks, dtype), options={"method": method}) for method in METHODS]
    check(gpu_pool, cases, "distributed", backend="nccl", times=2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_captured_calls_over_nccl_equal_the_truth(gpu_pool: WorkerPool, ranks: int) -> None:
    """Whole chunks: no kernel asks the host for positions."""
    cases = [case(ranks, dtype, 512) for dtype in DTYPES]
    cases.append(replace(cases[0], options={"relayout": True}))
    check(gpu_pool, cases, "distributed", backend="nccl", times=3, cuda_graph=True)


def test_a_group_with_a_backend_for_each_device_uses_that_of_its_gpus(
    gpu_pool: WorkerPool,
) -> None:
    """As `init_process_group()` makes it: only over NCCL calls can be captured."""
    cases = [case(2, torch.bfloat16, 512)]
    both = "cpu:gloo,cuda:nccl"
    check(gpu_pool, cases, "distributed", backend=both, times=2, cuda_graph=True)


def test_sixteen_ranks_as_nodes_equal_the_truth(gpu_pool: WorkerPool) -> None:
    """Four nodes of four where NCCL allows that on one GPU, else sixteen nodes."""
    mesh = case(16, torch.bfloat16)
    cases = [mesh, replace(mesh, options={"tile": (2, 8)})]
    check(gpu_pool, cases, "distributed", backend="nccl")


def two_of_three(rank: int, world_size: int, case: Case) -> Part | None:
    store = PrefixStore("bound", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    group = dist.new_group([0, 1])
    part = None
    if rank < 2:
        with context(case, group) as cp:
            part = attend(cp, case, "cuda")
    dist.barrier()
    return part


def test_ranks_outside_are_not_waited_for_where_the_job_is_bound_to_a_device(
    gpu_pool: WorkerPool,
) -> None:
    """With `init_process_group(device_id=...)` PyTorch splits groups off the job's communicator,
    in which all of its ranks would have to take part."""
    asked = case(2, torch.bfloat16)
    parts = [part for part in gpu_pool.run(two_of_three, 3, asked, seconds=SECONDS) if part]
    result = relative_errors(whole(parts, asked), attention(*asked.tensors(), asked.mask))
    assert max(result.values()) <= LIMIT[asked.dtype]
