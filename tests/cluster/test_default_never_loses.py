"""The default beside every method as it is by itself, on small questions: it is never more
than 3 % slower than any of them, by the simulator that it was chosen by."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_attention.choose.auto import find_default
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import plan_on, tokens_stay
from mesh_attention.cost.simulator import simulate
from mesh_attention.errors import PlanError
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

K = 1024
CAUSAL = Mask(causal=True)
# Cluster, ranks, thousands of tokens, heads, KV heads, mask.
QUESTIONS: dict[str, tuple[str, int, int, int, int, Mask]] = {
    "two ranks": ("hgx-h100", 2, 16, 16, 16, CAUSAL),
    "two ranks, full": ("paper", 2, 8, 32, 8, Mask()),
    "three": ("paper", 3, 24, 32, 8, CAUSAL),
    "four": ("hgx-h100", 4, 32, 16, 16, CAUSAL),
    "four, long": ("hgx-h100", 4, 256, 32, 8, CAUSAL),
    "four, full": ("paper", 4, 64, 64, 64, Mask()),
    "five": ("hgx-h100", 5, 40, 28, 4, CAUSAL),
    "six, few tokens": ("paper", 6, 6, 32, 8, CAUSAL),
    "seven, full": ("hgx-h100", 7, 56, 48, 1, Mask()),
    "eight": ("hgx-h100", 8, 64, 32, 8, CAUSAL),
    "eight, one KV head": ("paper", 8, 128, 32, 1, CAUSAL),
    "eight, long": ("paper", 8, 512, 64, 64, CAUSAL),
    "eight, full": ("hgx-h100", 8, 256, 16, 16, Mask()),
    "eight, window": ("hgx-h100", 8, 128, 32, 8, Mask(causal=True, window=(4 * K, 0))),
    "eight, documents": (
        *("paper", 8, 64, 32, 8),
        Mask(causal=True, documents=(0, 9 * K, 20 * K, 21 * K, 64 * K)),
    ),
    "twelve": ("paper", 12, 96, 40, 8, CAUSAL),
    "sixteen": ("hgx-h100", 16, 128, 64, 8, CAUSAL),
    "sixteen, full": ("paper", 16, 128, 64, 64, Mask()),
    "sixteen, few heads": ("paper", 16, 256, 8, 2, CAUSAL),
    "sixteen, little to do": ("hgx-h100", 16, 16, 16, 16, CAUSAL),
    "three, few heads": ("hgx-h100", 3, 32, 5, 5, CAUSAL),
    "ten, a node and a part of the next": ("hgx-h100", 10, 80, 10, 10, CAUSAL),
    "sixteen, documents": (
        *("hgx-h100", 16, 64, 40, 8),
        Mask(causal=True, documents=(0, 5000, *range(14_000, 60_000, 9000), 64 * K)),
    ),
}


# The others have every kind of mask, both clusters and two nodes of each too.
SLOW = (
    "two ranks, full",
    "four",
    "five",
    "eight, long",
    "eight, full",
    "twelve",
    "sixteen",
    "sixteen, full",
)


def seconds(plan: Plan, cluster: str) -> float:
    machine = load_cluster(cluster)
    return sum(simulate(plan, machine, direction).runtime_seconds for direction in Direction)


def least_seconds(plan: Plan, cluster: str) -> float:
    """A bound that no simulation is below."""
    machine = load_cluster(cluster)
    return sum(
        estimate(plan, machine, direction, ranks=(0,)).least_seconds for direction in Direction
    )


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, question in QUESTIONS.items()
    ],
)
def test_the_default_is_as_fast_as_any_method(
    question: tuple[str, int, int, int, int, Mask],
) -> None:
    cluster, ranks, tokens, heads, kv_heads, mask = question
    problem = Problem(tokens * K, heads, 128, num_kv_heads=kv_heads, mask=mask)
    default = seconds(find_default(problem, ranks, cluster).plan(), cluster)
    others: dict[str, float] = {}
    layout: dict[str, Any] = {} if mask.is_full else {"layout": "zigzag"}
    for method in METHODS:
        try:
            plan = plan_on(cluster, problem, ranks, method=method, **layout)
        except PlanError:
            continue
        assert tokens_stay(plan, {})
        if default > 1.03 * least_seconds(plan, cluster):
            others[method] = seconds(plan, cluster)
    for method, other in others.items():
        assert default <= 1.03 * other, f"{method}: {default / other:.3f} times as long"
