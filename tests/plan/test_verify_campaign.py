"""Whatever `verify` accepts runs and gives the right numbers: random damage, with the runtime as
the judge.

Plans of all methods, damaged at random in their text (`damage.py`). Most of it is refused.
What is not is run on all ranks in one process, from buffers full of NaN, and outputs and all
gradients are compared with attention by its definition in float64.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from damage_operands import OPERANDS
from damage_programs import PROGRAMS
from torch import Tensor

from mesh_attention import Plan, Problem, make_plan
from mesh_attention.errors import PlanError, PlanTextError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.read.verify import verify
from mesh_attention.testing import run_local
from support.random_masks import random_mask, random_slices
from support.reference import NAMES, Attention, attention, errors

SEEDS = 100
OF_A_SEED = 200  # 20,000 in all
SHORT_SEEDS = 6
OF_A_SHORT_SEED = 25
ALLOWED = {8: 1e-10, 4: 1e-5, 2: 0.03}  # by bytes of an element
MUTATIONS = (*OPERANDS, *PROGRAMS)
DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}


def mutate(rng: Random, text: str) -> tuple[str, str]:
    """Another text, and the names of what was done to it: mostly one thing, sometimes two."""
    lines = text.splitlines()
    done: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        changed = None
        while changed is None or changed == lines:
            mutation = rng.choice(MUTATIONS)
            try:
                changed = mutation(rng, list(lines))
            except (LookupError, ValueError, StopIteration):
                if not done:
                    raise
                changed = None  # what is damaged already may have no more to damage in this way
        lines = changed
        done.append(mutation.__name__)
    return "\n".join(lines) + "\n", " and ".join(done)


def random_plan(rng: Random) -> Plan:
    """Of any method, on 2 to 6 ranks, small enough that many can be tried."""
    while True:
        method, ranks = rng.choice(list(METHODS)), rng.randint(2, 6)
        kv_heads = rng.choice((1, 2, 2, 4, ranks))
        tokens = rng.choice((ranks, 2 * ranks, 3 * ranks + 1, 4 * ranks))
        keys = tokens if rng.random() < 0.8 else rng.randint(1, 3 * ranks)
        problem = Problem(
            tokens,
            kv_heads * rng.choice((1, 2, 2, 3)),
            4,
            kv_tokens=keys,
            num_kv_heads=kv_heads,
            v_head_dim=rng.choice((4, 4, 8)),
            element_bytes=rng.choice((8, 8, 8, 4, 2)),
            mask=rng.choice((*[random_mask] * 5, random_slices))(rng, tokens, keys),
        )
        wanted: dict[str, Any] = {
            "chunks": rng.choice(((1, 1), (2, 2), (1, 2), (2, 1))),
            "head_slices": rng.choice((None, (1, 1))),
            "combine": rng.choice(("exchange", "reduce-scatter")),
            "gather_out": rng.random() < 0.5,
            "keep": rng.choice(("auto", "shards", "exchanged", "gathered", "gathered")),
            "layout": rng.choice((None, "contiguous", "zigzag", "striped")),
            "ulysses": rng.choice((1, 2)),
            "rotation": rng.random() < 0.7,
            "ranks_per_node": rng.choice((None, None, 2, 3)),
            "tile": rng.choice(((1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (3, 1), (1, 3), (2, 1))),
        }
        known = METHODS[method].options()
        options = {name: value for name, value in wanted.items() if name in known}
        for given in (options, {name: v for name, v in options.items() if name != "tile"}):
            try:
                return make_plan(problem, ranks, method=method, **given)
            except PlanError:
                continue


@cache
def truth_of(problem: Problem) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Attention]:
    source = torch.Generator().manual_seed(0)
    dtype = DTYPES[problem.element_bytes]

    def draw(tokens: int, heads: int, width: int) -> Tensor:
        return torch.randn(2, tokens, heads, width, generator=source, dtype=torch.float64).to(dtype)

    tensors = (
        draw(problem.q_tokens, problem.num_heads, problem.head_dim),
        draw(problem.keys, problem.kv_heads, problem.head_dim),
        draw(problem.keys, problem.kv_heads, problem.v_dim),
        draw(problem.q_tokens, problem.num_heads, problem.v_dim),
    )
    return tensors, attention(*tensors, problem.mask)


def verdict(text: str) -> str:
    """What became of a damaged plan; fails where it was accepted and is wrong."""
    try:
        plan = parse_plan(text)
    except PlanTextError:
        return "no plan"
    if verify(plan):
        return "refused"
    directions = {one.direction for one in plan.passes}
    if Direction.FORWARD not in directions:
        return "accepted without a forward pass"
    tensors, truth = truth_of(plan.problem)
    if Direction.BACKWARD not in directions:
        tensors = tensors[:3]  # type: ignore[assignment]
    result = run_local(plan, *tensors)
    found = {n: getattr(result, n) for n in NAMES if getattr(result, n) is not None}
    distances = errors(found, truth)
    allowed = ALLOWED[plan.problem.element_bytes]
    assert max(distances.values()) <= allowed, f"accepted, and wrong: {distances}"
    return "accepted"


def campaign(seed: int, mutations: int) -> Counter[str]:
    found: Counter[str] = Counter()
    text = ""
    for number in range(mutations):
        rng = Random(f"{seed} {number // 10}")
        if number % 10 == 0:
            text = plan_text(random_plan(rng))
        rng = Random(f"{seed} {number}")
        mutant, name = mutate(rng, text)
        try:
            found[verdict(mutant)] += 1
        except Exception as error:
            message = f"seed {seed}, mutation {number}: {name}: {type(error).__name__} {error}"
            raise AssertionError(message) from error
    return found


@pytest.mark.parametrize("seed", range(SHORT_SEEDS))
def test_whatever_verify_accepts_gives_the_right_numbers(seed: int) -> None:
    found = campaign(seed, OF_A_SHORT_SEED)
    assert found["refused"] > OF_A_SHORT_SEED // 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS))
def test_whatever_verify_accepts_gives_the_right_numbers_20000_times(seed: int) -> None:
    found = campaign(seed, OF_A_SEED)
    assert found["refused"] > OF_A_SEED // 3
    assert found["accepted"] > 0


def test_every_mutation_finds_something_to_change_in_some_plan() -> None:
    changed = set()
    for seed in range(12):
        rng = Random(seed)
        lines = plan_text(random_plan(rng)).splitlines()
        for mutation in MUTATIONS:
            new = mutation(rng, list(lines))
            if new is not None and new != lines:
                changed.add(mutation)
    assert changed == set(MUTATIONS)
