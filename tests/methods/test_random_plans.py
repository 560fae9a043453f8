"""Every shape and option that a method offers, drawn at random, is proven as it was built.

`method_settings.py` deals settings out in turn, so some combinations never meet. Here each option
of a method is drawn by itself (`random_settings.py`). Settings that the method refuses do not
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest
from method_settings import shapes
from random_settings import random_problem, random_setting

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.read.verify import verify
from mesh_attention.plan.read.verify.order import order_fault

RANKS = (1, 2, 3, 4, 4, 5, 6, 6, 8, 8, 9, 12, 16)
# A plan takes time by the square of its ranks, and what goes wrong on 16 does so on few too.
FEW_RANKS = (1, 2, 3, 4, 4, 5, 6, 6, 8)
BLOCKS = 12  # of the default run: each test is this part of the sweep


def random_plans(seed: object, numbers: tuple[int, ...]) -> Iterator[tuple[Plan, dict[str, Any]]]:
    """Without end; what is refused is drawn again."""
    draw = Random(f"plans {seed}")
    methods = [*METHODS.values()]
    # What a method offers grows with every option: a method with many is drawn more often.
    weights = [2 ** (len(method.options()) / 4) for method in methods]
    while True:
        ranks, method = draw.choice(numbers), draw.choices(methods, weights)[0]
        problem = random_problem(draw, ranks)
        if not shapes(method, problem, ranks):
            continue
        setting = random_setting(draw, method, problem, ranks)
        try:
            plan = make_plan(problem, ranks, method=method.name, **setting)
        except PlanError:
            continue
        yield plan, {"ranks": ranks, "problem": problem, "method": method.name, **setting}


def prove(seed: object, count: int, numbers: tuple[int, ...]) -> None:
    for plan, asked in islice(random_plans(seed, numbers), count):
        findings = verify(plan)
        assert not findings, (asked, [str(finding) for finding in findings[:3]])
        for pass_ in plan.passes:
            assert {order_fault(program) for program in pass_.programs} == {None}, asked


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.slow) if part % 3 else part  # `make hostile` has more
        for part in range(BLOCKS)
    ],
)
def test_plans_of_random_settings_are_proven(part: int) -> None:
    prove(part, 240 // BLOCKS, FEW_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_seven_thousand_plans_of_random_settings_are_proven(part: int) -> None:
    prove(f"slow {part}", 70, RANKS)


def test_the_sweep_meets_every_option_of_every_method() -> None:
    """`costs` are a machine's, and change an order only."""
    met: dict[str, set[str]] = {name: set() for name in METHODS}
    draw = Random("options")
    for name, method in METHODS.items():
        for _ in range(200):
            problem = random_problem(draw, 4)
            if shapes(method, problem, 4):
                met[name] |= random_setting(draw, method, problem, 4).keys()
    for name, method in METHODS.items():
        assert method.options().keys() - met[name] <= {"costs"}, name
