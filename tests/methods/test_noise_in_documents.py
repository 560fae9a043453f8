"""Noise in one document leaves all others as they were, bit by bit, in whatever way it is done."""

from __future__ import annotations

import pytest
import torch

from mesh_attention import Mask, Problem, make_plan
from support.noise import WAYS, check_apart, plan_of_batch

PACKS = ([0, 13, 14, 14, 40, 64], [0, 5, 37])
CALLS = ((Mask(causal=True), PACKS[0], 3), (Mask(window=(4, 2)), PACKS[1], 4))


@pytest.mark.parametrize("way", WAYS)
def test_noise_in_a_document_of_a_batch_reaches_no_other(way: str) -> None:
    for mask, starts, ranks in CALLS:
        plan = plan_of_batch(way, starts, ranks, torch.float32, mask)
        check_apart(plan, starts, torch.float32, noise=300.0)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "chosen"])
def test_not_even_nan_or_infinity_leaves_a_document_by_rectangles(way: str) -> None:
    """Kernels for any mask multiply what is hidden by zero: these are none."""
    for starts, layout, noise in zip(
        PACKS, ("contiguous", "zigzag"), (torch.nan, torch.inf), strict=True
    ):
        mask = Mask(causal=True, documents=tuple(starts))
        problem = Problem(starts[-1], 4, 8, num_kv_heads=2, element_bytes=4, mask=mask)
        plan = make_plan(problem, 4, method=way, layout=layout)
        check_apart(plan, starts, torch.float32, noise)


def test_noise_is_noticed_where_documents_are_not_apart() -> None:
    starts = PACKS[1]
    plan = make_plan(Problem(starts[-1], 4, 8, element_bytes=4), 2, method="mesh")
    with pytest.raises(AssertionError, match="out"):
        check_apart(plan, starts, torch.float32, noise=300.0)
