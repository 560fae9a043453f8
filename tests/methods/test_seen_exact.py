"""Only what is seen travels, and it is enough: random masks, layouts and ranks against float64.

Workspaces and outputs begin as NaN, so a row that is missing or never written shows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Mask, count, verify
from mesh_attention.plan.methods.parts.assignment import factorisations
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.testing import run_local
from support.cases import HEADS, Case, random_heads, random_mask
from support.gloo_check import check as check_gloo
from support.listed import stretches_for
from support.pool import WorkerPool
from support.reference import NAMES, attention, errors, tolerance

T = 48
MASKS = {
    "window left": Mask(causal=True, window=(7, 0)),
    "window of nothing but itself": Mask(causal=True, window=(0, 0)),
    "window right": Mask(window=(0, 5)),
    "window on both sides": Mask(window=(9, 4)),
    "window without an end": Mask(window=(None, 3)),
    "prefix": Mask(causal=True, prefix=11),
    "documents": Mask(causal=True, documents=(0, 7, 20, 21, 40, T)),
    "documents of one token and of none": Mask(
        causal=True, documents=(0, 0, 1, 2, 12, 12, 12, 30, 31, T, T)
    ),
    "documents of single tokens": Mask(documents=tuple(range(T + 1))),
    "documents with a window": Mask(causal=True, window=(3, 0), documents=(0, 10, 30, T)),
    "documents with prefixes": Mask(causal=True, prefix=4, documents=(0, 2, 25, T)),
    "documents without keys, and without queries": Mask(
        documents=(0, 10, 10, 40, T), kv_documents=(0, 0, 20, 25, T)
    ),
}


def check(case: Case, bound: float | None = None) -> None:
    plan, tensors = case.plan(), case.tensors()
    assert verify(plan) == [], case
    result = run_local(plan, *tensors)
    found = {name: getattr(result, name) for name in NAMES}
    distances = errors(found, attention(*tensors, case.mask))
    assert max(distances.values()) <= (bound or tolerance(case.dtype)), (distances, case)
    for direction, counted in count(plan).items():
        for rank in counted.ranks:
            total = result.traffic[direction.value][rank.rank].total
            moved = (total.sent_bytes, total.received_bytes)
            expected = (rank.total.sent_bytes, rank.total.received_bytes)
            assert moved == tuple(case.batch * each for each in expected), case


@pytest.mark.parametrize("ranks", [3, 4])  # four as a tile of 2x2
@pytest.mark.parametrize("mask", MASKS)
def test_every_kind_of_mask_on_every_layout(mask: str, ranks: int) -> None:
    for layout in LayoutKind:
        options: dict[str, Any] = {"method": "seen", "layout": layout}
        options |= {"stripe_block": 3} if layout is LayoutKind.STRIPED else {}
        options["tile"] = (2, 2) if ranks == 4 else None
        options["stretches"] = stretches_for(layout, random.Random(mask), T, ranks)
        check(Case(ranks, T, T, mask=MASKS[mask], options=options))


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    ranks, heads = draw.randint(1, 9), draw.choice(HEADS)
    q_tokens = draw.choice([1, max(1, ranks - 1), 2 * ranks + 1, draw.randint(1, 70)])
    layout = draw.choice([None, *LayoutKind])
    alike = layout is LayoutKind.LISTED or draw.random() < 0.7
    kv_tokens = q_tokens if alike else draw.randint(1, 70)
    striped = {"stripe_block": draw.randint(1, 4)} if layout is LayoutKind.STRIPED else {}
    return Case(
        ranks,
        q_tokens,
        kv_tokens,
        heads=heads,
        head_dims=draw.choice([(8, 8), (8, 12), (16, 4)]),
        batch=draw.randint(1, 2),
        mask=random_mask(draw, q_tokens, kv_tokens),
        dtype=draw.choice([torch.float64, torch.float32]),
        seed=seed,
        options={
            "method": "seen",
            "tile": draw.choice([None, *factorisations(ranks)]),
            "layout": layout,
            "stretches": stretches_for(layout, draw, q_tokens, ranks),
            "gather_out": draw.random() < 0.3,
            **striped,
            **random_heads(draw, heads[1]),
        },
    )


@pytest.mark.parametrize("block", range(4))
def test_random_masks_sizes_and_layouts_equal_the_truth(block: int) -> None:
    for seed in range(6 * block, 6 * (block + 1)):
        check(drawn(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8, 80))
def test_many_random_masks_sizes_and_layouts_equal_the_truth(block: int) -> None:
    for seed in range(10 * block, 10 * (block + 1)):
        check(drawn(seed))


def test_in_bf16_it_stays_within_its_rounding() -> None:
    for seed in range(6):
        check(replace(drawn(seed), dtype=torch.bfloat16), bound=0.02)


@pytest.mark.parametrize("ranks", [4])
def test_real_processes_with_windows_documents_and_nothing_to_exchange(
    pool: WorkerPool, ranks: int
) -> None:
    masks = [MASKS["window left"], MASKS["documents of one token and of none"]]
    masks.append(Mask(causal=True, documents=(0, 12, 24, 36, T)))
    options: dict[str, Any] = {"method": "seen", "layout": "contiguous"}
    cases = [Case(ranks, T, T, mask=mask, options=options) for mask in masks]
    check_gloo(pool, [*cases, replace(cases[1], options=options | {"tile": (2, 2)})])
