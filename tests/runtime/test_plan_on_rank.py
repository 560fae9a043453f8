"""A plan meets a process group: as many ranks, each device once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_attention import Problem, make_plan
from mesh_attention.errors import PlanError
from mesh_attention.runtime.session.documents import BatchPlans
from mesh_attention.runtime.session.rank_plan import RankPlan

PLAN = make_plan(Problem(64, 4, 8), 4, method="mesh")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_a_plan_for_another_number_of_ranks_is_refused(num_ranks: int) -> None:
    with pytest.raises(PlanError, match=f"for 4 ranks, and the process group has {num_ranks}"):
        RankPlan.on(PLAN, 0, num_ranks)


def test_a_rank_is_where_the_plan_puts_its_device() -> None:
    assert [RankPlan.on(PLAN, place, 4).rank for place in range(4)] == [0, 1, 2, 3]
    turned = replace(PLAN, devices=(2, 0, 3, 1))
    assert [RankPlan.on(turned, place, 4).rank for place in range(4)] == [1, 3, 0, 2]
    with pytest.raises(PlanError, match="are not the ranks of the group"):
        RankPlan.on(replace(PLAN, devices=(0, 1, 2, 4)), 0, 4)


def test_a_batch_keeps_the_plans_of_a_layer_until_the_session_is_released() -> None:
    session: Any = SimpleNamespace(
        groups=SimpleNamespace(releases=0), plans=SimpleNamespace(of=lambda question: [question])
    )
    pack: Any = SimpleNamespace(question=lambda layer: SimpleNamespace(of_shards="shards"))
    plans: Any = BatchPlans(session, pack)
    layer = "layer"
    first = plans.source(session, layer, True)
    assert plans.source(session, layer, True) is first
    assert plans.source(session, layer, False).first == ["shards"]
    session.groups.releases = 1
    assert plans.source(session, layer, True) is not first
