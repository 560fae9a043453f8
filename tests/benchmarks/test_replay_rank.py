"""One rank of a simulated plan: durations, flops, and nothing of the other ranks."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from replay.rank import RankToReplay, Replayed, may_be_slowest, rank_of, rank_to_replay

from mesh_attention import Mask, MeshAttentionError, Problem
from mesh_attention.cost import Timeline, load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.timeline import Stream
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.methods.table import METHODS
from support.sample import sample


def timeline(method: str, direction: Direction = Direction.FORWARD) -> Timeline:
    cluster = load_cluster("paper")
    problem = Problem(8192, 16, 64, mask=Mask(causal=True))
    plan = plan_on(cluster, problem, 16, method=method, directions=(direction,))
    return simulate(plan, cluster, direction)


@pytest.mark.parametrize(("method", "direction"), sample(product(METHODS, Direction), 3))
def test_communications_last_as_simulated(method: str, direction: Direction) -> None:
    results = timeline(method, direction)
    part = rank_to_replay(results, 5)
    events = {event.name: event for event in results.events(5)}
    talked = 0.0
    for op, seconds in zip(part.program.operations, part.seconds, strict=True):
        if isinstance(op, Communication):
            assert seconds == events[op.name].end - events[op.name].start
            talked += seconds
        else:
            assert seconds == 0.0
    assert talked > 0.0
    assert part.program == results.pass_.programs[5]
    assert part.rank == 5


def test_flops_of_the_whole_are_shared_equally() -> None:
    results = timeline("mesh")
    part = rank_to_replay(results, 0)
    assert part.flops * 16 == pytest.approx(results.flops)
    assert part.peak_tflops == 989
    assert part.predicted["runtime_seconds"] == results.runtime_seconds


def test_nothing_of_other_ranks_is_kept_and_it_can_be_stored() -> None:
    part = rank_to_replay(timeline("mesh"), 7)
    assert len(part.pass_.programs) == len(part.plan.passes[0].programs) == 1
    assert all(7 in members for members in part.pass_.groups.values())
    again = RankToReplay.from_json(json.loads(json.dumps(part.to_json())))
    assert again == part
    assert again.pass_.schedule == part.pass_.schedule


def test_nothing_is_pickled() -> None:
    """To load a pickle is to run what somebody put into it."""
    folder = Path(__file__).parents[2] / "benchmarks"
    assert [str(file) for file in folder.rglob("*.py") if "pickle" in file.read_text()] == []


def computing(timeline: Timeline, rank: int) -> float:
    return sum(e.end - e.start for e in timeline.events(rank) if e.stream is Stream.COMPUTE)


@pytest.mark.parametrize("method", METHODS)
def test_of_the_ranks_that_end_last_those_with_the_most_work_are_replayed(method: str) -> None:
    results = timeline(method)
    ranks = may_be_slowest(results)
    assert rank_of(results, "slowest") == ranks[0]
    assert 1 <= len(ranks) <= 4
    ends = [max(results.ranks[rank].end) for rank in range(16)]
    assert min(ends[rank] for rank in ranks) >= 0.97 * results.runtime_seconds
    last = [rank for rank in range(16) if ends[rank] >= 0.97 * results.runtime_seconds]
    most = max(computing(results, rank) for rank in last)
    assert computing(results, ranks[0]) == pytest.approx(most, abs=1e-5)


def test_under_a_window_the_first_rank_has_less_work_and_is_not_replayed() -> None:
    """It waits for others, and so ends as late as they do."""
    cluster = load_cluster("hgx-h100")
    problem = Problem(65536, 16, 64, mask=Mask(causal=True, window=(8192, 0)))
    plan = plan_on(cluster, problem, 16, method="seen", layout="contiguous")
    assert rank_of(simulate(plan, cluster, Direction.BACKWARD), "slowest") > 1


def test_a_rank_above_the_peak_of_the_gpu_is_an_error() -> None:
    part = rank_to_replay(timeline("ring"))
    sizes = dict.fromkeys(
        ("peak_bytes", "workspace_bytes", "planned_scratch_bytes", "mask_bytes", "stand_in_bytes"),
        0,
    )
    lasts = part.flops / (part.peak_tflops * 1e12) / 2
    result = Replayed("a GPU", part, 16, True, lasts, (lasts,), lasts, **sizes, kernels=())
    with pytest.raises(MeshAttentionError, match="at 200 % of the peak: it has less work than oth"):
        _ = result.mfu_percent


def test_ranks_of_one_computation_are_replayed_once() -> None:
    cluster = load_cluster("paper")
    plan = plan_on(cluster, Problem(8192, 16, 64), 16, method="ring", layout="contiguous")
    assert may_be_slowest(simulate(plan, cluster, Direction.FORWARD)) == [0]


@pytest.mark.parametrize("asked", [-1, 16, "fastest"])
def test_ranks_that_are_not_there_are_refused(asked: int | str) -> None:
    with pytest.raises(MeshAttentionError, match="ranks 0 to 15; or give slowest"):
        rank_of(timeline("mesh"), asked)
