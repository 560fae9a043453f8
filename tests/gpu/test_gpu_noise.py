"""Noise in one document of a batch reaches no other, bit by bit, with deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mesh_attention import Mask
from support.noise import WAYS, check_apart, plan_of_batch

pytestmark = pytest.mark.gpu

STARTS = [0, 100, 101, 400, 700]  # borders inside the blocks of kernels


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", ["triton", None])
@pytest.mark.parametrize("way", WAYS)
def test_noise_in_a_document_reaches_no_other(way: str, kernel: str | None) -> None:
    dtype, mask = torch.bfloat16, Mask(causal=True)
    plan = plan_of_batch(way, STARTS, 4, dtype, mask, head_dim=64)
    check_apart(plan, STARTS, dtype, noise=30.0, device="cuda", kernel=kernel)
