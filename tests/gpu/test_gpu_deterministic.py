"""Need 35 on a GPU: with `deterministic=True` two runs give the same bits, in both passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mesh_attention import Mask
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case
from support.gloo_case import attend, context
from support.gpu_case import SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

RANKS = 2
CASE = Case(
    *(RANKS, 1021, 1021),
    heads=(8, 2),
    head_dims=(128, 128),
    mask=Mask(causal=True),
    dtype=torch.bfloat16,
)
DOCUMENTS = Mask(causal=True, documents=(0, 100, 101, 400, 1021))


def two_runs(
    rank: int, world_size: int, cases: list[Case], backend: str, options: dict[str, Any]
) -> list[tuple[list[str], set[str]]]:
    """Of each case: what differs in four calls, the first two and the last two of one object; and
    what is said of the kernels."""
    results = []
    group = dist.new_group(backend=backend) if backend != "gloo" else None
    with context(cases[0], group, deterministic=True, **options):
        for case in cases:
            runs, said = [], set[str]()
            for _ in range(2):
                with context(case, group, deterministic=True, **options) as cp:
                    runs += [attend(cp, case, "cuda").tensors for _ in range(2)]
                    kinds = ("full", "causal", "range")
                    said |= {
                        reasons[-1][1]
                        for name, reasons in cp.kernels().items()
                        if name.split()[1] in kinds
                    }
                    cp.check()
            first, *others = runs
            differ = [n for run in others for n, x in run.items() if not torch.equal(x, first[n])]
            results.append((differ, said))
    return results


def check(pool: WorkerPool, cases: list[Case], backend: str, **options: Any) -> None:
    question = (cases, backend, options)
    for result in pool.run(two_runs, RANKS, *question, seconds=2 * SECONDS):
        assert result == [([], {"chosen, deterministic"})] * len(cases)


@pytest.mark.parametrize("mask", [CASE.mask, DOCUMENTS], ids=["causal", "documents"])
def test_two_runs_over_nccl_give_the_same_bits(gpu_pool: WorkerPool, mask: Mask) -> None:
    """Need 35."""
    cases = [replace(CASE, mask=mask, options={"method": method}) for method in METHODS]
    check(gpu_pool, cases, "nccl", transport="distributed")


def test_two_runs_through_shared_memory_give_the_same_bits(gpu_pool: WorkerPool) -> None:
    """Need 35."""
    check(
        gpu_pool, [CASE, replace(CASE, options={"method": "ring"})], "gloo", transport="symmetric"
    )


@pytest.mark.parametrize("kernel", ["cuda_flash", "triton"])
def test_kernels_that_can_are_the_same_every_time(gpu_pool: WorkerPool, kernel: str) -> None:
    """Need 35: the flash kernel of PyTorch by its switch, ours without atomics."""
    options = {"one_call": True} if kernel == "triton" else {}
    case = replace(CASE, q_tokens=1024, kv_tokens=1024, options=options)
    check(gpu_pool, [case], "nccl", transport="distributed", kernel=kernel)
