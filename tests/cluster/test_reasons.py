"""The sentence about a choice says what is known, and calls it by its name."""

from __future__ import annotations

from mesh_attention.cluster.auto import Standing
from mesh_attention.cluster.load import load_cluster
from mesh_attention.cluster.planning import plan_on
from mesh_attention.cluster.reasons import why
from mesh_attention.cluster.simulate import simulate
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction
from mesh_attention.plan.problem import Problem


def standing(name: str, problem: Problem) -> Standing:
    cluster, only = load_cluster("hgx-h100"), (Direction.FORWARD,)
    options = {"layout": "contiguous"}
    plan = plan_on(cluster, problem, 4, method=name, directions=only, **options)
    timeline = simulate(plan, cluster, Direction.FORWARD)
    return Standing(name, options, timeline.runtime_seconds, timeline)


UNEVEN = Problem(32768, 4, 64, mask=Mask(documents=(0, *range(8192, 32769, 1024))))


def test_waiting_for_slower_ranks_is_no_communication() -> None:
    seen, ring = standing("seen", UNEVEN), standing("ring", Problem(512, 4, 64))
    assert "receives nothing, and it waits" in why([seen], [[seen]])
    assert "ms for slower ranks" in why([seen], [[seen]])
    assert "of communication stay open" not in why([seen], [[seen]])
    assert "ms of communication stay open" in why([ring], [[ring]])
