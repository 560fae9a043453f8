"""bfloat16: every method has at most twice the error of one device, on any number of ranks.

The measure is that of tests/runtime/test_local_bf16.py: the root mean square over rows of the
relative error against float64, in units of the same on one device. What is rounded: partials that
travel, sums of a node that leave it, copies of KV heads that several head groups share, and
the end; never a sum at every hop. The figures are printed; see them with `pytest -rP`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from method_settings import shapes

from mesh_attention import Mask, make_plan
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.testing import run_local
from support.bf16 import TENSORS, Errors
from support.cases import Case
from support.reference import Attention, attention
from support.sample import sample

MASKS = {"causal": Mask(causal=True), "full": Mask()}
KERNEL = "blockwise"  # products of bfloat16 matrices take long where no hardware does them


def case(mask: str) -> Case:
    return Case(
        1, 256, 256, heads=(4, 2), head_dims=(16, 16), mask=MASKS[mask], dtype=torch.bfloat16
    )


@cache
def truth(mask: str) -> Attention:
    return attention(*case(mask).tensors(), MASKS[mask])


def errors(mask: str, ranks: int, **options: Any) -> dict[str, Errors]:
    plan = make_plan(case(mask).problem, ranks, **({"method": "mesh"} | options))
    result, true = run_local(plan, *case(mask).tensors(), kernel=KERNEL), truth(mask)
    return {name: Errors.of(getattr(result, name), getattr(true, name)) for name in TENSORS}


@cache
def alone(mask: str) -> dict[str, Errors]:
    return errors(mask, 1)


def over_one_device(mask: str, ranks: int, **options: Any) -> dict[str, float]:
    sharded_errors = errors(mask, ranks, **options)
    return {name: round(sharded_errors[name].over(alone(mask)[name]).rows, 2) for name in TENSORS}


# The worst of their kind, and what was above two before: sums that were rounded at every hop.
WORST: dict[str, dict[str, Any]] = {
    "ring": {"method": "ring"},
    "ring on nodes": {"method": "ring", "ranks_per_node": 4},
    "outputs of a ring": {"method": "agkv-ringqo", "tile": (16, 1)},
    "the same on nodes": {"method": "agkv-ringqo", "tile": (16, 1), "ranks_per_node": 4},
    "a row of a mesh on nodes": {"method": "mesh", "tile": (16, 1), "ranks_per_node": 4},
    "only what is seen": {"method": "seen"},
    "shared KV heads": {"method": "mesh-usp", "ulysses": 4, "tile": (1, 4)},
}


@pytest.mark.parametrize("which", sample(WORST, 4))
def test_the_worst_of_16_ranks_have_at_most_twice_the_error_of_one_device(which: str) -> None:
    ratios = over_one_device("causal", 16, **WORST[which])
    print(which, ratios)
    assert max(ratios.values()) <= 2.0, ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mask", "ranks_per_node"),
    [(2, "full", None), (8, "causal", 2), (16, "full", 4), (32, "full", None), (64, "causal", 8)],
)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_tile_on_up_to_64_ranks_has_at_most_twice_the_error_of_one_device(
    method: str, ranks: int, mask: str, ranks_per_node: int | None
) -> None:
    settings = shapes(METHODS[method], case(mask).problem, ranks)
    # All tiles; of Ulysses degrees with something inside them only some: each takes half a minute.
    for setting in settings[:: 1 + len(settings) // 9]:
        options = setting | {"method": method, "ranks_per_node": ranks_per_node}
        ratios = over_one_device(mask, ranks, **options)
        print(ranks, options, ratios)
        assert max(ratios.values()) <= 2.0, (options, ratios)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grad_v", {"method": "ring", "gradients": "travel"}),
        ("out", {"method": "agkv-ringqo", "tile": (16, 1), "outputs": "travel"}),
    ],
    ids=["gradients", "outputs"],
)
def test_the_error_of_sums_that_travel_with_their_block_is_larger(
    name: str, options: dict[str, Any]
) -> None:
    """So they do that only where it is asked for."""
    assert over_one_device("causal", 16, **options)[name] > 2.0
