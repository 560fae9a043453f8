"""Only what is seen travels, and it is enough: every kind of mask on every layout, against float64.

Random masks, sizes and settings of this method are in `test_method_masks.py`.

Workspaces and outputs begin as NaN, so a row that is missing or never written shows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mesh_attention import Mask, verify
from mesh_attention.plan.problem.layout import LayoutKind
from support.cases import Case
from support.gloo_check import check as check_gloo
from support.listed import stretches_for
from support.local_check import check as check_local
from support.pool import WorkerPool

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
    assert verify(case.plan()) == [], case
    check_local(case, bound)


@pytest.mark.parametrize("mask", MASKS)
def test_every_kind_of_mask_on_every_layout(mask: str) -> None:
    """On three ranks and on a tile of 2x2 in turn."""
    turn = list(MASKS).index(mask)
    for number, layout in enumerate(LayoutKind):
        check(on_layout(mask, layout, 3 + (turn + number) % 2))


def on_layout(mask: str, layout: LayoutKind, ranks: int) -> Case:
    options: dict[str, Any] = {"method": "seen", "layout": layout}
    options |= {"stripe_block": 3} if layout is LayoutKind.STRIPED else {}
    options["tile"] = (2, 2) if ranks == 4 else None
    options["stretches"] = stretches_for(layout, random.Random(mask), T, ranks)
    return Case(ranks, T, T, mask=MASKS[mask], options=options)


def test_in_bf16_it_stays_within_its_rounding() -> None:
    for number, layout in enumerate(LayoutKind):
        mask = ("prefix", "documents")[number % 2]
        options = on_layout(mask, layout, 4).options | {"head_slices": (1, 1)}
        case = Case(4, T, T, batch=2, mask=MASKS[mask], options=options)
        check(replace(case, dtype=torch.bfloat16), bound=0.02)


@pytest.mark.parametrize("ranks", [4])
def test_real_processes_with_windows_documents_and_nothing_to_exchange(
    pool: WorkerPool, ranks: int
) -> None:
    masks = [MASKS["window left"], MASKS["documents of one token and of none"]]
    masks.append(Mask(causal=True, documents=(0, 12, 24, 36, T)))
    options: dict[str, Any] = {"method": "seen", "layout": "contiguous"}
    cases = [Case(ranks, T, T, mask=mask, options=options) for mask in masks]
    check_gloo(pool, [*cases, replace(cases[1], options=options | {"tile": (2, 2)})])
