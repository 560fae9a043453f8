"""Plans of all methods, damaged at random in their text (`damage.py`), and what becomes of them.

Most are refused. What `verify` accepts is run on all ranks in one process, from buffers full of
NaN, and outputs and all gradients are compared with attention by its definition in float64.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any

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

__all__ = ["MUTATIONS", "damaged", "mutate", "random_plan", "verdict"]

OF_A_PLAN = 10  # mutations of each plan that is drawn
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
        for kwargs in (options, {name: v for name, v in options.items() if name != "tile"}):
            try:
                return make_plan(problem, ranks, method=method, **kwargs)
            except PlanError:
                continue


@lru_cache(maxsize=16)
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
    directions = {pass_.direction for pass_ in plan.passes}
    if Direction.FORWARD not in directions:
        return "accepted without a forward pass"
    tensors, truth = truth_of(plan.problem)
    if Direction.BACKWARD not in directions:
        tensors = tensors[:3]  # type: ignore[assignment]
    result = run_local(plan, *tensors)
    outputs = {n: getattr(result, n) for n in NAMES if getattr(result, n) is not None}
    distances = errors(outputs, truth)
    allowed = ALLOWED[plan.problem.element_bytes]
    assert max(distances.values()) <= allowed, f"accepted, and wrong: {distances}"
    return "accepted"


@lru_cache(maxsize=2)
def _text_of(seed: object, plan: int) -> str:
    return plan_text(random_plan(Random(f"{seed} {plan}")))


def damaged(seed: object, number: int) -> tuple[str, str]:
    """The text of a damaged plan, and what was done to it."""
    return mutate(Random(f"{seed} {number}"), _text_of(seed, number // OF_A_PLAN))
