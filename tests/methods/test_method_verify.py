"""`verify` proves every method of the table on up to 64 ranks, forward and backward.

Proving every shape takes about an hour, so the default run proves every shape of one to seven
ranks, and then one method for every third number of ranks up to 26, in turn; the rest is slow.
Above 40 ranks these are methods whose transfers do not grow with the square of the ranks.
"""

from __future__ import annotations

from itertools import product

import pytest
from method_cases import heads_for, problem_of
from method_settings import Setting, deal, every_setting, manners, shapes

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.parts.assignment import PLACES
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify
from support.sample import sample

NAMES = list(METHODS)
ALL_SHAPES = 7
ALL_METHODS = 40
MOST = 64
QUICK = ["mesh", "allgather-kv", "mesh-usp", "agq-ringkv"]
NEAR_NODES = [(6, 3), (8, 4), (16, 4)]


def prove(name: str, problem: Problem, ranks: int, setting: Setting) -> Plan:
    plan = make_plan(problem, ranks, method=name, **setting)
    findings = verify(plan)
    assert not findings, (name, ranks, problem, setting, [str(f) for f in findings[:3]])
    return plan


def prove_every_shape(name: str, ranks: int) -> None:
    """Each with another manner, and causal every other time."""
    shared = problem_of(ranks, heads_for(ranks)[0])
    for number, setting in enumerate(deal(METHODS[name], shared, ranks, at_least=2)):
        causal = (number + ranks) % 2 == 0
        prove(name, problem_of(ranks, heads_for(ranks)[0], causal=causal), ranks, setting)


@pytest.mark.parametrize("ranks", sample(range(1, ALL_SHAPES + 1), 2))
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_of_every_method_is_proven(name: str, ranks: int) -> None:
    prove_every_shape(name, ranks)


def in_turn(ranks: int) -> str:
    names = NAMES if ranks <= ALL_METHODS else QUICK
    # With an even number of methods each would always meet the same of odd and even.
    shift = 0 if len(names) % 2 else ranks // len(names)
    return names[(ranks + shift) % len(names)]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(ranks, marks=[pytest.mark.slow] * (ranks > 28 or ranks % 3 != 2))
        for ranks in range(ALL_SHAPES + 1, MOST + 1)
    ],
)
def test_every_number_of_ranks_up_to_64_is_proven_for_some_method(ranks: int) -> None:
    """Odd and prime ones too; the methods take turns."""
    name = in_turn(ranks)
    causal = ranks // len(NAMES) % 2 == 0
    problem = problem_of(ranks, heads_for(ranks)[0], causal=causal)
    (setting,) = deal(METHODS[name], problem, ranks, at_most=1)
    prove(name, problem, ranks, setting)


def test_in_these_turns_every_method_meets_odd_and_even_numbers_causal_and_not() -> None:
    turns = [(in_turn(n), n % 2, n // len(NAMES) % 2) for n in range(ALL_SHAPES + 1, MOST + 1)]
    assert {(name, odd) for name, odd, _ in turns} == set(product(NAMES, (0, 1)))
    assert {(name, causal) for name, _, causal in turns} == set(product(NAMES, (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(ALL_SHAPES + 1, MOST + 1))
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_of_every_method_on_up_to_64_ranks_is_proven(name: str, ranks: int) -> None:
    prove_every_shape(name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_product_of_settings_masks_and_heads_is_proven(name: str, ranks: int) -> None:
    for setting, causal, heads in product_of(name, ranks):
        prove(name, problem_of(ranks, heads, causal=causal), ranks, setting)


def product_of(name: str, ranks: int) -> list[tuple[Setting, bool, tuple[int, int]]]:
    """Settings with masks; heads take turns where the product would repeat itself."""
    method = METHODS[name]
    combinations = []
    for heads in (heads_for(ranks)[0], heads_for(ranks)[-1]):
        for causal in (False, True):
            settings = every_setting(method, problem_of(ranks, heads), ranks)
            combinations += [(setting, causal, heads) for setting in settings]
    return combinations


@pytest.mark.parametrize(("ranks", "per_node"), NEAR_NODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_candidate_of_a_method_is_a_legal_setting_and_is_proven(
    name: str, ranks: int, per_node: int
) -> None:
    problem = problem_of(ranks, heads_for(ranks)[0], causal=ranks % 4 == 0)
    method = METHODS[name]
    candidates = method.candidates(problem, ranks, per_node)
    legal = shapes(method, problem, ranks)
    assert candidates
    for setting in candidates:
        shape = {option: value for option, value in setting.items() if option not in PLACES}
        assert any(shape.items() <= fitting.items() for fitting in legal), (name, setting)
    few = 1 if ranks > 8 else 2  # a proof takes time by the square of the ranks
    for setting in candidates[:: max(1, -(-len(candidates) // few))]:
        prove(name, problem, ranks, {"ranks_per_node": per_node, **setting})


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_every_method_prints_and_parses_back(name: str) -> None:
    problem = problem_of(4, (8, 2), causal=True)
    for setting in deal(METHODS[name], problem, 4):
        plan = make_plan(problem, 4, method=name, **setting)
        assert parse_plan(plan_text(plan)) == plan


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_at_least_one_manner_for_each_layout(name: str) -> None:
    assert {manner["layout"] for manner in manners(METHODS[name])} == {
        "contiguous",
        "zigzag",
        "striped",
        "listed",
    }
