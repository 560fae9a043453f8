"""Every method on every cluster: it ends, it moves what `count` counts, and it beats no limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_cases import problem_of, timeline_of

from mesh_attention.cost import Overlap, cluster_names, load_cluster
from mesh_attention.cost.planning import plan_on, setting_of
from mesh_attention.errors import PlanError
from mesh_attention.machine.load import ClusterError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.read.count import count
from support.sample import sample

PAPER = load_cluster("paper")


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "hgx-h100"))
        for name in cluster_names()
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_simulates_on_every_cluster(
    method: str, cluster: str, direction: Direction
) -> None:
    for ranks in (8, 16) if cluster == "paper" else (16,):
        timeline = timeline_of(method, ranks, cluster=cluster, direction=direction)
        summary = timeline.to_json()
        counted = count(timeline.plan)[direction]
        expected = tuple(rank.total.received_bytes for rank in counted.ranks)
        assert timeline.received_bytes == expected
        compiled = replace(
            timeline.plan, passes=(timeline.pass_,)
        )  # in no more memory than planned
        least = count(compiled)[direction].peak_buffer_bytes
        assert summary["runtime_seconds"] > 0
        assert 0 < summary["mfu_percent"] < 100
        assert 0 <= summary["exposed_communication_seconds"] < summary["runtime_seconds"]
        assert summary["workspace_bytes"] >= least
        assert least <= counted.peak_buffer_bytes
        assert summary["peak_bytes"] > summary["workspace_bytes"]


@pytest.mark.parametrize("method", sample(METHODS, 2))
def test_less_overlap_is_never_faster(method: str) -> None:
    events, strict, none = (
        timeline_of(method, 16, cluster="paper", overlap=overlap).runtime_seconds
        for overlap in (Overlap.EVENTS, Overlap.STRICT, Overlap.NONE)
    )
    # Lanes that less often work at once slow each other less, which a tiny problem can gain by.
    assert events <= strict * 1.05
    assert strict <= none * 1.25


def test_the_cluster_says_how_many_ranks_a_node_has() -> None:
    plan = plan_on(PAPER, problem_of(), 16, method="mesh", directions=(Direction.FORWARD,))
    assert plan.ranks_per_node == 8
    assert (
        plan_on(
            PAPER,
            problem_of(),
            16,
            method="mesh",
            directions=(Direction.FORWARD,),
            ranks_per_node=8,
        )
        == plan
    )
    with pytest.raises(ClusterError, match="ranks_per_node=4: a node of paper has 8 ranks"):
        plan_on(PAPER, problem_of(), 16, method="mesh", ranks_per_node=4)


def test_more_ranks_than_the_cluster_has_are_refused_before_planning() -> None:
    with pytest.raises(ClusterError, match="paper has 256 ranks"):
        plan_on(PAPER, problem_of(), 512, method="mesh")


def test_an_unknown_method_is_refused_as_everywhere() -> None:
    with pytest.raises(PlanError, match="known methods"):
        plan_on(PAPER, problem_of(), 8, method="rng")


def test_a_setting_names_what_was_chosen() -> None:
    options: dict[str, Any] = {"tile": (4, 4), "alpha": 2, "chunks": (2, 1), "gather_out": True}
    plan = plan_on(PAPER, problem_of(), 16, method="mesh", **options)
    setting = setting_of(plan, plan.backward, options)
    assert setting["tile"] == "4x4"
    assert setting["chunks"] == "2x1"
    assert setting["alpha"] == 2
    assert setting["layout"] == "zigzag"
    assert setting["gather_out"] is True
    default = plan_on(PAPER, problem_of(), 16, method="mesh")
    assert setting_of(default, default.forward, {})["alpha"] is None
