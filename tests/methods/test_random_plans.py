"""Every shape and option that a method offers, drawn at random, is proven as it was built.

`method_settings.py` deals settings out in turn, so some combinations never meet. Here each option
of a method is drawn by itself, from all values that it may have. Settings that the method refuses
do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest
from method_settings import listed, manners, shapes

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.read.verify import verify
from mesh_attention.plan.read.verify.order import order_fault

RANKS = (1, 2, 3, 4, 4, 5, 6, 6, 8, 8, 9, 12, 16)
# A plan takes time by the square of its ranks, and what goes wrong on 16 does so on few too.
FEW_RANKS = (1, 2, 3, 4, 4, 5, 6, 6, 8)
CHUNKS = (*[(1, 1)] * 6, (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (2, 3))
BLOCKS = 12  # of the default run: each test is this part of the sweep


def random_problem(draw: Random, ranks: int) -> Problem:
    tokens = draw.choice([2 * ranks, 4 * ranks, 3 * ranks + 1, 8 * ranks, max(1, 2 * ranks - 1)])
    kv_heads = draw.choice([1, 2, 3, ranks, 2 * ranks, 2 * ranks])
    heads = kv_heads * draw.choice([1, 1, 2, 4])
    mask = draw.choice(
        [
            Mask(),
            Mask(causal=True),
            Mask(causal=True),
            Mask(causal=True, window=(max(1, tokens // 4), 0)),
            Mask(causal=True, documents=tuple(sorted({0, draw.randint(0, tokens), tokens}))),
        ]
    )
    crossed = mask == Mask() and draw.random() < 0.3
    return Problem(
        tokens,
        heads,
        4,
        num_kv_heads=kv_heads,
        kv_tokens=draw.randint(1, 3 * ranks) if crossed else None,
        mask=mask,
        element_bytes=draw.choice([2, 8]),
    )


def random_slices(draw: Random, held: int) -> tuple[int, int] | None:
    """KV heads of the first slice and of the largest; one by one every other time."""
    if held < 2:
        return None
    largest = draw.choice([1, draw.randint(1, held - 1)])
    return draw.randint(1, largest), largest


def random_setting(draw: Random, method: Method, problem: Problem, ranks: int) -> dict[str, Any]:
    options = method.options()
    setting = draw.choice(shapes(method, problem, ranks)) | draw.choice(manners(method))
    if draw.random() < 0.7:
        setting["relayout"] = False  # it leaves out what most others combine
    held = max(1, problem.kv_heads // (setting.get("ulysses") or 1))
    exchanges = (setting.get("ulysses") or 1) > 1 and not setting["relayout"]
    drawn: dict[str, Callable[[], Any]] = {
        "chunks": lambda: draw.choice(CHUNKS),
        "backward_chunks": lambda: draw.choice(CHUNKS),
        "head_slices": lambda: random_slices(draw, held),
        "backward_head_slices": lambda: random_slices(draw, held),
        "backward_tile": lambda: draw.choice(shapes(method, problem, ranks)).get("tile"),
        "combine": lambda: draw.choice(["auto", "exchange", "nodes", "reduce-scatter"]),
        "even_chunks": lambda: exchanges and setting["layout"] == "zigzag",
        "short_start": lambda: exchanges,
        "max_memory_bytes": lambda: None if exchanges else draw.randint(1000, 200_000),
        "ranks_per_node": lambda: draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0]),
        "alpha": lambda: draw.choice([1, 2, 4]),
        "units_per_node": lambda: draw.choice([1, 2]),
        "scheduler": lambda: draw.choice(["greedy", "search"]),
        "gamma": lambda: draw.choice([0.5, 1.05, 2.0]),
        "stripe_block": lambda: draw.choice([1, 2, 3]),
    }
    often = {"head_slices": 0.7, "chunks": 0.7, "combine": 0.5, "ranks_per_node": 0.5}
    for name, value in drawn.items():
        if name in options and draw.random() < often.get(name, 0.12):
            setting[name] = value()
    if "ranks_per_node" not in setting:
        for name in ("alpha", "units_per_node"):
            setting.pop(name, None)
    if setting["layout"] != "striped":
        setting.pop("stripe_block", None)
    setting |= listed(setting, problem.q_tokens, ranks, draw.randint(0, 9))
    return setting


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
        for one in plan.passes:
            assert {order_fault(program) for program in one.programs} == {None}, asked


@pytest.mark.parametrize("part", range(BLOCKS))
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
