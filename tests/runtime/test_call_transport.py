"""What ranks must make together before a call: process groups of collectives, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import Problem, make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.execute.executor import CallShape
from mesh_attention.runtime.session.rank_plan import RankPlan
from mesh_attention.runtime.session.transports import CallTransport, TransportName, Transports
from mesh_attention.runtime.transport.groups import Groups

CALL_SHAPE = CallShape(1, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("method", "options", "needed"),
    [
        ("usp", {"ulysses": 2}, set[tuple[int, ...]]()),  # exchanges, and rings of pairs
        ("mesh", {"tile": (2, 2), "chunks": (1, 1)}, {(0, 1), (0, 2)}),
    ],
)
def test_a_call_is_connected_once_the_groups_of_its_collectives_are_made(
    method: str, options: dict[str, Any], needed: set[tuple[int, ...]]
) -> None:
    groups: Any = object.__new__(Groups)
    groups.ranks, groups._made = (0, 1, 2, 3), {}
    plan = make_plan(Problem(64, 4, 8), 4, method=method, **options)
    rank_plan = RankPlan.on(plan, 0, 4)
    shared, wanted = Transports(groups), TransportName.AUTO
    transport = CallTransport(shared, wanted, rank_plan, CALL_SHAPE, None)
    for ranks in ((0, 1, 2, 3), *needed):
        assert not transport.is_connected(Direction)
        groups._made[ranks] = None
    assert transport.is_connected(Direction)
