"""What is no plan, cluster, method, pass or timeline is refused by name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_cases import problem_of

from mesh_attention import MeshAttentionError
from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import find_best
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.pictures import draw_gantt, trace_of
from mesh_attention.cost.planning import plan_on
from mesh_attention.machine.load import parse_cluster

HGX = load_cluster("hgx-h100")
PROBLEM = problem_of(4096)
PLAN = plan_on(HGX, PROBLEM, 4, method="mesh")
TIMELINE = simulate(PLAN, HGX)
TEXT = "name = 1"

BAD: dict[str, Callable[[], Any]] = {
    "no plan": lambda: simulate(None, HGX),  # type: ignore[arg-type]
    "a problem as plan": lambda: simulate(PROBLEM, HGX),  # type: ignore[arg-type]
    "no cluster": lambda: simulate(PLAN, None),  # type: ignore[arg-type]
    "unknown cluster": lambda: simulate(PLAN, "hgx-h10"),
    "long name": lambda: load_cluster("x" * 5000),
    "other nodes": lambda: simulate(make_plan(PROBLEM, 4, method="mesh", ranks_per_node=2), HGX),
    "overlap": lambda: simulate(PLAN, HGX, overlap="x"),
    "pass": lambda: simulate(PLAN, HGX, "sideways"),
    "ranks 0": lambda: find_best(PROBLEM, 0, HGX, method="mesh"),
    "ranks as text": lambda: find_best(PROBLEM, "4", HGX, method="mesh"),  # type: ignore[arg-type]
    "plan on ranks as text": lambda: plan_on(HGX, PROBLEM, "4", method="mesh"),  # type: ignore[arg-type]
    "no problem": lambda: find_best(None, 4, HGX, method="mesh"),  # type: ignore[arg-type]
    "method": lambda: find_best(PROBLEM, 4, HGX, method=[]),  # type: ignore[arg-type]
    "direction": lambda: find_best(PROBLEM, 4, HGX, directions=("x",)),
    "search overlap": lambda: find_best(PROBLEM, 4, HGX, method="mesh", overlap="x"),
    "options": lambda: find_best(PROBLEM, 4, HGX, method="mesh", options="x"),  # type: ignore[arg-type]
    "directions": lambda: make_plan(PROBLEM, 4, method="mesh", directions=("x",)),  # type: ignore[arg-type]
    "directions as text": lambda: make_plan(PROBLEM, 4, method="mesh", directions="forward"),  # type: ignore[arg-type]
    "bytes": lambda: parse_cluster(b"", "x"),  # type: ignore[arg-type]
    "nested": lambda: parse_cluster("a = " + "[" * 5000, "x"),
    "one timeline": lambda: trace_of(TIMELINE),  # type: ignore[arg-type]
    "a chart of nothing": lambda: draw_gantt([], "x.png"),
    "a chart nowhere": lambda: draw_gantt([TIMELINE], None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_it_is_refused(bad: Callable[[], Any]) -> None:
    with pytest.raises(MeshAttentionError):
        bad()


def test_a_cluster_may_be_given_by_its_name() -> None:
    assert simulate(PLAN, "hgx-h100").runtime_seconds == TIMELINE.runtime_seconds
    assert find_best(PROBLEM, 4, "hgx-h100", method="mesh").asked.cluster == HGX


def test_kernels_faster_than_the_gpu_are_refused() -> None:
    from importlib import resources

    text = (resources.files("mesh_attention.machine") / "clusters/hgx-h100.toml").read_text()
    with pytest.raises(MeshAttentionError, match="faster than"):
        parse_cluster(text.replace("peak_tflops = 989", "peak_tflops = 100"), "mine")
    with pytest.raises(MeshAttentionError, match="usual size"):
        parse_cluster(text.replace("peak_tflops = 989", "peak_tflops = " + "9" * 400), "mine")
