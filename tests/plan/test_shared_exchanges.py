"""Plans share exchanges, and what is remembered of one is true for each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import AllToAll
from mesh_attention.plan.language.traffic import TrafficMeter

PROBLEM = Problem(16 * 64, 8, 16, num_kv_heads=4, mask=Mask(causal=True))


def plan_with(tile: tuple[int, int], problem: Problem = PROBLEM) -> Plan:
    how: dict[str, Any] = {"method": "mesh-usp", "ulysses": 4, "chunks": (2, 2)}
    return make_plan(problem, 16, tile=tile, **how)


def exchanges(plan: Plan, rank: int) -> list[AllToAll]:
    """Of tokens for heads, without those that reduce partial results."""
    every = [op for op in plan.forward.programs[rank].operations if isinstance(op, AllToAll)]
    return [op for op in every if op.task.kind.startswith("EX-")]


@pytest.mark.parametrize("rank", [0, 7])
def test_tiles_of_one_cut_have_the_same_exchanges(rank: int) -> None:
    of_tiles = [
        sorted(exchanges(plan_with(tile), rank), key=lambda op: op.name)
        for tile in ((2, 2), (1, 4))
    ]
    assert of_tiles[0]
    assert [*map(id, of_tiles[0])] == [*map(id, of_tiles[1])]


def test_an_exchange_that_is_remembered_moves_the_bytes_of_each_problem() -> None:
    plan = plan_with((2, 2))
    table = plan.forward.programs[0].buffer_table()
    (op, *_) = exchanges(plan, 0)
    before, wide, again = (
        TrafficMeter(replace(PROBLEM, element_bytes=size), table).flows(op) for size in (2, 4, 2)
    )
    assert {m: 2 * size for m, size in before.sent.items()} == wide.sent
    assert again == before


def test_exchanges_that_differ_in_the_last_member_alone_are_not_equal() -> None:
    (op, *_) = exchanges(plan_with((2, 2)), 0)
    fewer = replace(op, sends=(*op.sends[:-1], ()))
    assert hash(fewer) == hash(op)
    assert fewer != op
    assert len({op, fewer}) == 2
