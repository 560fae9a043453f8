"""Plans in real processes on one GPU: forward and backward against float64, every byte counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case
from support.gpu_case import check
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

CAUSAL = Mask(causal=True)
TRANSPORTS = ("distributed", "symmetric")
DTYPES = (torch.bfloat16, torch.float32)


def case(ranks: int, dtype: torch.dtype) -> Case:
    """Causal, fewer KV heads than query heads, and a length that no number of ranks divides."""
    return Case(
        ranks, 509, 509, heads=(16, 8), head_dims=(64, 64), batch=2, mask=CAUSAL, dtype=dtype
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_on_one_gpu_equal_the_truth(
    gpu_pool: WorkerPool, ranks: int, dtype: torch.dtype, transport: str
) -> None:
    causal = case(ranks, dtype)
    chunked = replace(causal, options={"chunks": (2, 2)})
    full = replace(causal, mask=Mask(), kv_tokens=301)
    check(gpu_pool, [causal, chunked, full], transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contiguous_shards_are_exchanged_and_equal_the_truth(
    gpu_pool: WorkerPool, transport: str
) -> None:
    cases = [
        replace(case(4, dtype), options={"method": method, "relayout": True})
        for dtype in DTYPES
        for method in ("mesh", "ring", "usp")
    ]
    check(gpu_pool, cases, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_four_ranks_equals_the_truth(
    gpu_pool: WorkerPool, method: str, transport: str
) -> None:
    cases = [replace(case(4, dtype), options={"method": method}) for dtype in DTYPES]
    check(gpu_pool, cases, transport)
