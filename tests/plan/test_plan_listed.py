"""Plans on a listed layout: asked for, refused, printed, compared, and in order of position."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.errors import PlanError, PlanTextError
from mesh_attention.plan.language.program import Attend
from mesh_attention.plan.language.text import digest, parse_plan, plan_text
from mesh_attention.plan.read.agreement import question_digest
from mesh_attention.plan.read.draw import draw_summary
from support.listed import stretches_for

PROBLEM = Problem(40, num_heads=4, head_dim=8, mask=Mask(causal=True, documents=(0, 11, 30, 40)))
STRETCHES = stretches_for("listed", Random(3), 40, 4)
OTHERS = stretches_for("listed", Random(4), 40, 4)


@pytest.mark.parametrize("method", ["mesh", "ulysses", "ring", "usp"])
def test_a_plan_with_stretches_prints_and_parses_back(method: str) -> None:
    plan = make_plan(PROBLEM, 4, method=method, layout="listed", stretches=STRETCHES)
    assert plan.q_layout.stretches == plan.kv_layout.stretches
    again = parse_plan(plan_text(plan))
    assert again == plan
    assert digest(again) == digest(plan)
    assert question_digest(again) == question_digest(plan)
    assert "listed, " in draw_summary(plan)


def test_ranks_with_other_stretches_notice_it() -> None:
    plan, other = (
        make_plan(PROBLEM, 4, method="mesh", layout="listed", stretches=stretches)
        for stretches in (STRETCHES, OTHERS)
    )
    assert question_digest(plan) != question_digest(other)


def test_lists_from_anywhere_are_read() -> None:
    assert STRETCHES is not None
    lists = [[[np.int64(start), stop] for start, stop in own] for own in STRETCHES]
    plan = make_plan(PROBLEM, 4, method="mesh", layout="listed", stretches=lists)
    assert plan == make_plan(PROBLEM, 4, method="mesh", layout="listed", stretches=STRETCHES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "listed"}, "needs 'stretches'"),
        ({"stretches": STRETCHES}, "only apply to layout=listed, not zigzag"),
        ({"layout": "listed", "stretches": 7}, "give for each rank its"),
        ({"layout": "listed", "stretches": ((1, 2), (3, 4))}, "give for each rank its"),
        ({"layout": "listed", "stretches": (((0, 1.5),),)}, r"stretches=1\.5"),
    ],
)
def test_what_is_no_list_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_plan(PROBLEM, 4, method="mesh", **options)


def test_queries_and_keys_of_different_numbers_are_refused() -> None:
    crossed = Problem(40, num_heads=4, head_dim=8, kv_tokens=30)
    with pytest.raises(PlanError, match="40 query and 30 key tokens"):
        make_plan(crossed, 4, method="mesh", layout="listed", stretches=STRETCHES)


def test_a_text_that_lists_a_position_twice_is_refused() -> None:
    stretches = (((0, 20), (30, 40)), ((20, 30),), (), ())
    text = plan_text(make_plan(PROBLEM, 4, method="mesh", layout="listed", stretches=stretches))
    assert parse_plan(text).q_layout.stretches == stretches
    with pytest.raises(PlanTextError, match=r"positions 30\.\.31 are listed twice"):
        parse_plan(text.replace("[20, 30]", "[20, 31]"))


@pytest.mark.parametrize("method", ["ulysses", "usp"])
def test_after_the_exchange_rows_lie_in_order_of_position(method: str) -> None:
    """So that what a row sees is one interval of rows."""
    problem = replace(PROBLEM, num_heads=8, num_kv_heads=8)
    plan = make_plan(problem, 4, method=method, layout="listed", stretches=STRETCHES)
    for program in plan.forward.programs:
        table = program.buffer_table()
        for op in program.operations:
            if isinstance(op, Attend):
                positions = plan.q_layout.positions_of(table[op.q.buffer].rows)
                assert (np.diff(positions) > 0).all()
                assert len(positions) > plan.q_layout.slots
