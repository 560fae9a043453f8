"""Plans moved by copies between shared blocks give the truth, for every method and kind of case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mesh_attention import Mask
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case, random_case
from support.reference import attention, errors, tolerance
from support.shared_run import run_shared

CAUSAL = Mask(causal=True)


def check(case: Case) -> None:
    result = run_shared(case.plan(), *case.tensors())
    distances = errors(result, attention(*case.tensors(), case.mask))
    assert max(distances.values()) <= tolerance(case.dtype), (distances, case)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_every_method_over_shared_blocks_equals_the_truth(method: str, ranks: int) -> None:
    case = Case(ranks, 83, 83, heads=(8, 8), batch=2, mask=CAUSAL, options={"method": method})
    check(case)
    check(replace(case, mask=Mask(), kv_tokens=61, dtype=torch.float32))


@pytest.mark.parametrize("combine", list(Combine))
def test_every_combine_mode_over_shared_blocks_equals_the_truth(combine: Combine) -> None:
    options = {"combine": combine, "chunks": (3, 2)}
    check(Case(6, 67, 67, heads=(8, 2), batch=2, mask=CAUSAL, options=options))


@pytest.mark.parametrize("seed", range(8))
def test_random_cases_over_shared_blocks_equal_the_truth(seed: int) -> None:
    ranks, tile = [(2, (1, 2)), (4, (2, 2)), (6, (3, 2)), (8, (2, 4))][seed % 4]
    check(random_case(seed, ranks, tile))


def test_a_bf16_sum_is_rounded_once() -> None:
    """Partial outputs of eight ranks are added in fp32, so their number does not show."""
    case = Case(
        8,
        128,
        128,
        dtype=torch.bfloat16,
        options={"tile": (1, 8), "combine": Combine.REDUCE_SCATTER},
    )
    result = run_shared(case.plan(), *case.tensors())
    distances = errors(result, attention(*case.tensors(), case.mask))
    assert distances["out"] < 0.01
