"""Rows that stay for the backward pass, on GPUs: exact, captured too, in memory as counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.setting import Keep
from mesh_attention.plan.read.count import kept_bytes
from support.cases import Case
from support.gloo_case import context
from support.gpu_case import SECONDS, check
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

MIB, LAYERS = 2**20, 3
CASE = Case(
    4, 512, 512, heads=(16, 8), head_dims=(64, 64), batch=2, mask=Mask(causal=True),
    dtype=torch.bfloat16,
)  # fmt: skip
METHODS: list[dict[str, Any]] = [
    {"method": "ulysses"},
    {"method": "mesh-usp", "ulysses": 2, "tile": (2, 1), "head_slices": (1, 1)},
    {"method": "mesh", "tile": (2, 2), "relayout": True},
]
CASES = [replace(CASE, options=how | {"keep": keep.value}) for how in METHODS for keep in Keep]


@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}], ids=["eager", "graph"])
def test_kept_rows_over_nccl_give_the_truth(gpu_pool: WorkerPool, options: dict[str, Any]) -> None:
    check(gpu_pool, CASES, "distributed", backend="nccl", times=3, **options)


def test_kept_rows_over_shared_memory_give_the_truth(gpu_pool: WorkerPool) -> None:
    check(gpu_pool, CASES, "symmetric", times=2)


def held_by_layers(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    """Bytes that the allocator has given to the forward passes of some layers, whose inputs nobody
    else holds."""
    measured = []
    for case in cases:
        with context(case) as cp:
            leaves = [cp.shard(x.cuda(), 1).requires_grad_() for x in case.tensors()[:3]]
            cp.attention(*(leaf.clone() for leaf in leaves))  # workspace and kernels are made
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            outs = [cp.attention(*(leaf.clone() for leaf in leaves)) for _ in range(LAYERS)]
            measured.append(torch.cuda.memory_allocated() - before)
            del outs
    return measured


def test_layers_hold_between_their_passes_what_is_counted(gpu_pool: WorkerPool) -> None:
    cases = [replace(case, q_tokens=8192, kv_tokens=8192) for case in CASES]
    by_rank = gpu_pool.run(held_by_layers, 4, cases, seconds=SECONDS)
    for number, case in enumerate(cases):
        counted = case.batch * kept_bytes(case.plan(), LAYERS).held_bytes
        most = max(measured[number] for measured in by_rank)
        assert abs(most - counted) <= 2 * MIB, (case.options, most / MIB, counted / MIB)
