"""Every method of the table over real processes, through `ContextParallel`, with bytes counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from method_settings import deal

from mesh_attention import Mask
from mesh_attention.plan.methods.table import METHODS
from support.cases import Case
from support.gloo_check import check
from support.pool import WorkerPool

SETTINGS = {4: 1, 8: 2}  # of those that the table deals out


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_causal_gqa_with_an_uneven_length_equals_the_truth_and_moves_the_counted_bytes(
    pool: WorkerPool, name: str, ranks: int
) -> None:
    case = Case(ranks, 45, 45, heads=(2 * ranks, 2), mask=Mask(causal=True))
    settings = deal(METHODS[name], case.problem, ranks, at_least=2, at_most=SETTINGS[ranks])
    check(pool, [replace(case, options={"method": name, **setting}) for setting in settings])


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_with_nothing_chosen_every_method_equals_the_truth(
    pool: WorkerPool, name: str, ranks: int
) -> None:
    """Defaults, and the ranks of two nodes; not causal, keys of another number than queries."""
    case = Case(ranks, 37, 29, heads=(ranks, ranks), options={"method": name})
    nodes = replace(case, batch=2, options={"method": name, "ranks_per_node": ranks // 2})
    check(pool, [case, nodes])
