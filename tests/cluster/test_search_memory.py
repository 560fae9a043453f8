"""What a search leaves to Python's garbage collector: nothing in cycles, and no look at what caches
keep."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mesh_attention import Mask, Problem
from mesh_attention.choose.auto import PlanChoice, find_default
from mesh_attention.cost.planning import collector_paused

MANY = 30_000  # small objects


@pytest.fixture(autouse=True)
def nothing_else_to_collect() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def search(kv_heads: int = 8) -> PlanChoice:
    """One in which a method is refused: its ranks do not hold as many heads."""
    problem = Problem(1 << 18, 64, 128, num_kv_heads=kv_heads, mask=Mask(causal=True))
    return find_default(problem, 64, "hgx-h100", {"head_slices": (2, 2)})


def make_many() -> list[list[int]]:
    with collector_paused():
        made: list[list[int]] = [[at] for at in range(MANY)]
    return made


def is_young(item: object) -> bool:
    return any(item is other for other in gc.get_objects(0))


def test_a_search_leaves_no_cycles() -> None:
    search()  # what is imported or made once
    gc.collect()
    gc.disable()
    try:
        choice = search(kv_heads=4)
        assert choice.refused
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_many_objects_count_as_old_once_the_collector_goes_on() -> None:
    made = make_many()
    assert gc.isenabled()
    assert not is_young(made[0])
    assert not is_young(made[-1])


def test_few_objects_stay_young() -> None:
    with collector_paused():
        made = [[at] for at in range(10)]
    assert is_young(made[0])


def test_objects_that_the_caller_has_frozen_stay_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    made = make_many()
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=100)
    assert made


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        assert make_many()
        assert not gc.isenabled()
    finally:
        gc.enable()
