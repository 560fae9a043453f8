"""The first answer of `auto`: at once, for any sizes, with bytes as plans count them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from mesh_attention.cost.machine.rates import usual_rates
from mesh_attention.errors import PlanError
from mesh_attention.plan.bounds import least_bytes
from mesh_attention.plan.count import count
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.first_answer import first_answers
from mesh_attention.plan.methods.table import AUTO, METHODS
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem
from mesh_attention.choose.ask import ask, make_plan
from mesh_attention.plan.text import digest
from mesh_attention.plan.verify import verify

CAUSAL = Mask(causal=True)


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 64), (7, 64), (5, 3), (8, 64)])
def test_any_sizes_have_an_answer_that_holds(ranks: int, tokens: int) -> None:
    plan = make_plan(Problem(tokens, 8, 16, num_kv_heads=2, mask=CAUSAL), ranks, method=AUTO)
    assert verify(plan) == []
    first = first_answers(plan.problem, ranks)[0]
    same = make_plan(plan.problem, ranks, method=first.name, **first.options)
    assert digest(plan) == digest(same)


@pytest.mark.parametrize("kv_heads", [2, 16])
def test_its_bytes_are_those_that_plans_count(kv_heads: int) -> None:
    """But for statistics; every answer, not only the best."""
    problem = Problem(1024, 16, 16, num_kv_heads=kv_heads, mask=CAUSAL)
    answers = first_answers(problem, 8)
    assert {one.name for one in answers} >= {"ulysses", "usp", "mesh", "mesh-usp"}
    for one in answers:
        plan = make_plan(problem, 8, method=one.name, directions=BOTH[:1], **one.options)
        ranks = count(plan)[Direction.FORWARD].ranks
        tokens = sum(rank.total.token_bytes for rank in ranks) / 8
        assert one.received_bytes == pytest.approx(tokens), one
        assert tokens >= least_bytes(problem, 8, Direction.FORWARD)


BOTH = tuple(Direction)


@pytest.mark.parametrize("ranks", [256, 4096, 4093])
def test_no_constructor_waits_for_it(ranks: int) -> None:
    problem = Problem(1 << 22, 64, 128, num_kv_heads=8, mask=CAUSAL)
    first_answers(problem, 8)
    begin = time.process_time()
    answers = first_answers(problem, ranks)
    assert time.process_time() - begin < 0.2
    assert answers == sorted(answers, key=lambda one: one.total)


def test_the_links_decide() -> None:
    problem = Problem(131072, 64, 128, num_kv_heads=64, mask=CAUSAL)
    slow = replace(usual_rates(), between_bytes=1e9)
    inside, outside = first_answers(problem, 8)[0], first_answers(problem, 64, rates=slow)[0]
    assert inside.total < outside.total
    fewest = min(one.received_bytes for one in first_answers(problem, 64))
    assert outside.received_bytes <= 2 * fewest  # bytes are all that counts there
    few = ask(problem, 16, method=AUTO, rates=slow, ranks_per_node=16)
    many = ask(problem, 16, method=AUTO, rates=slow, ranks_per_node=2)
    assert few != many


def test_what_shows_little_travels_little() -> None:
    problem = Problem(65536, 64, 128, num_kv_heads=8, mask=Mask(causal=True, window=(1024, 0)))
    assert first_answers(problem, 16)[0].name == "seen"
    assert first_answers(problem, 16, {"tile": (4, 4)})[0].name != "seen"


def test_options_narrow_the_methods_and_stay() -> None:
    problem = Problem(4096, 8, 64, mask=CAUSAL)
    plan = make_plan(problem, 8, method=AUTO, tile="2x4", chunks=(2, 2))
    assert plan.forward.setting["tile"] == "2x4"
    assert plan.forward.setting["chunks"] == "2x2"
    assert ask(problem, 8, method=AUTO, team=2).method == "startrail"
    assert ask(problem, 8, method=AUTO, layout="striped").setting.layout == "striped"
    with pytest.raises(PlanError, match="no method has all of the options inner, team"):
        make_plan(problem, 8, method=AUTO, team=2, inner=2)
    with pytest.raises(PlanError, match=r"known methods: .*auto"):
        make_plan(problem, 8, method="automatic")
    assert AUTO not in METHODS
