"""What the page shows is what the search, the simulator and the plans say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_attention.choose.auto import find_best
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import plan_on
from mesh_attention.machine.load import load_cluster
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.draw import visible_cells
from mesh_attention.report.assignment import assignment_facts
from mesh_attention.report.estimates import Scaling, points_of_scaling, scaling_lines, shape_times
from mesh_attention.report.facts import CHOSEN, ReportFacts
from support.report_case import PROBLEM, RANKS


def test_the_choice_is_the_fastest_of_the_table_and_has_its_chart(
    report_facts: ReportFacts,
) -> None:
    in_order = sorted(report_facts.methods, key=lambda each: each.seconds)
    assert report_facts.methods == tuple(in_order)
    assert report_facts.methods[0].seconds == report_facts.seconds
    for direction in Direction:
        best = min(method.passes[direction].seconds for method in report_facts.methods)
        (chart,) = (g for g in report_facts.gantts if (g.name, g.direction) == (CHOSEN, direction))
        assert best <= chart.seconds
        assert chart.method == report_facts.chosen[direction]
        assert max(event.end for event in chart.events) <= chart.seconds
        assert {event.rank for event in chart.events} == set(range(RANKS))
    charts = {g.name for g in report_facts.gantts}
    assert 2 <= len(charts) <= 4
    assert report_facts.seconds == sum(g.seconds for g in report_facts.gantts if g.name == CHOSEN)
    for entry in report_facts.methods:
        assert entry.seconds == sum(p.seconds for p in entry.passes.values())
        for direction, p in entry.passes.items():
            assert p.received_bytes >= 0.999 * report_facts.least_bytes[direction]
            assert p.peak_bytes <= entry.peak_bytes
    assert json.loads(json.dumps(report_facts.to_json()))["reason"] == report_facts.reason


@pytest.mark.parametrize(
    ("options", "groups", "heads"),
    [
        ({"method": "mesh", "tile": (2, 4)}, {"Q", "KV"}, (0,)),
        ({"method": "mesh-usp", "ulysses": 2, "tile": (2, 2)}, {"Q", "KV", "U"}, (0, 4)),
        ({"method": "ulysses"}, set(), (0, 1, 2, 3)),
    ],
)
def test_of_each_head_every_visible_tile_has_one_rank(
    options: dict[str, object], groups: set[str], heads: tuple[int, ...]
) -> None:
    problem = Problem(256, 8, 16, mask=Mask(causal=True))
    plan = plan_on("hgx-h100", problem, 8, **options)
    assignment = assignment_facts(plan)
    assert assignment.heads == heads
    visible = visible_cells(plan, 8).tolist()
    for direction in Direction:
        assert set(assignment.groups[direction]) == groups
        for head in heads:
            matrix = assignment.matrix(direction, head).ranks
            assert [[rank is not None for rank in row] for row in matrix] == visible
        for name, members in assignment.groups[direction].items():
            sizes = {
                len(ranks)
                for at, ranks in plan.direction(direction).groups.items()
                if at.startswith(name) and at[len(name)].isdecimal()
            }
            assert {members.count(number) for number in members} == sizes
    if len(heads) > 1:  # other ranks compute other heads
        first, second = (assignment.matrix(Direction.FORWARD, head).ranks for head in heads[:2])
        assert not {*sum(first, ())} & {*sum(second, ())} - {None}


def test_of_many_partitions_some_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on("hgx-h100", Problem(64, 2, 16), 8, method="mesh", tile=(2, 4))
    whole = assignment_facts(plan).matrices[0].ranks
    monkeypatch.setattr("mesh_attention.report.assignment.MOST_PARTITIONS", 3)
    assignment = assignment_facts(plan)
    assert assignment.partitions == (0, 3, 6)
    assert assignment.matrices[0].ranks == tuple(row[::3] for row in whole[::3])


def test_scaling_keeps_tokens_or_tokens_a_rank(report_facts: ReportFacts) -> None:
    for line in report_facts.scaling:
        for point in line.points:
            share = PROBLEM.q_tokens // RANKS
            strong = line.scaling is Scaling.STRONG
            assert point.tokens == (PROBLEM.q_tokens if strong else point.ranks * share)
            assert point.seconds > 0
            assert 0 < point.mfu_percent < 100
    for scaling in Scaling:
        ranks = {
            p.ranks for row in report_facts.scaling if row.scaling is scaling for p in row.points
        }
        assert ranks == {4, 8}
    # Both are the problem itself at its own number of ranks.
    own = [
        {
            row.name: p
            for row in report_facts.scaling
            if row.scaling is s
            for p in row.points
            if p.ranks == 4
        }
        for s in Scaling
    ]
    assert own[0] == own[1]


def test_points_of_scaling_are_those_that_the_cluster_has() -> None:
    cluster = load_cluster("hgx-h100")
    assert points_of_scaling(24, cluster) == [8, 16, 24, 32, 64, 128, 256, 512, 1024]
    assert points_of_scaling(2048, cluster)[-2:] == [1024, 2048]
    assert points_of_scaling(6, replace(cluster, nodes=2)) == [6, 8, 16]


def test_documents_have_no_weak_scaling_and_lines_of_long_programs_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(64, 2, 16, mask=Mask(causal=True, documents=(0, 40, 64)))
    asked = find_best(problem, 2, "hgx-h100", method="ring", options={"layout": "contiguous"}).asked

    def points(scaling: Scaling) -> list[int]:
        lines = scaling_lines(asked, (Direction.FORWARD,), scaling, (2, 4, 8), lambda: None)
        return [point.ranks for line in lines for point in line.points]

    assert points(Scaling.WEAK) == [2]
    assert points(Scaling.STRONG) == [2, 4, 8]
    monkeypatch.setattr("mesh_attention.report.estimates.MOST_OPERATIONS", 30)
    assert points(Scaling.STRONG) == [2, 4]


def test_times_of_shapes_are_those_of_one_rank(
    report_facts: ReportFacts, report_cluster: Path
) -> None:
    assert {(shape.name, shape.direction) for shape in report_facts.shapes} >= {
        ("mesh", direction) for direction in Direction
    }
    for direction in Direction:
        asked = find_best(PROBLEM, RANKS, report_cluster, directions=(direction,)).asked
        result = shape_times(asked, direction, "mesh", lambda: None)
        assert result is not None
        assert result in report_facts.shapes
        assert result.shapes == ("1x4", "2x2", "4x1")
        assert result.slices == (1, 2, 4)
        setting = {"tile": (2, 2), "chunks": (1, 1), "head_slices": (2, 2)}
        plan = asked.plan(direction, "mesh", setting)
        seen = estimate(plan, asked.cluster, direction, ranks=(RANKS // 2,))
        timed = result.times[1][1]
        assert timed is not None
        assert (timed.seconds, timed.peak_bytes) == (seen.seconds, seen.peak_bytes)
