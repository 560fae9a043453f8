"""Ranks do alike things at alike steps: readers answer alike operations once, and so stay fast."""

from __future__ import annotations

from itertools import product

import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.program import AllGather, AllToAll, ReduceScatter, SendRecv
from mesh_attention.plan.methods.table import METHODS
from support.sample import sample

RANKS = 32


@pytest.mark.parametrize(("method", "causal"), sample(product(METHODS, (False, True)), 3))
def test_what_is_not_a_transfer_is_alike_for_a_step_and_not_another_for_each_rank(
    method: str, causal: bool
) -> None:
    problem = Problem(RANKS * 64, RANKS, 8, mask=Mask(causal=causal))
    plan = make_plan(problem, RANKS, method=method)
    for pass_ in plan.passes:
        operations = [op for program in pass_.programs for op in program.operations]
        alike = {
            op
            for op in operations
            if not isinstance(op, AllGather | ReduceScatter | AllToAll | SendRecv)
        }
        # A few kinds of operation at each of at most 32 steps, in a few states of a causal mask.
        assert len(alike) <= 16 * RANKS, f"{len(alike)} of {len(operations)}"
