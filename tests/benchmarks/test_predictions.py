"""`benchmarks/predicted_against_measured.py` without a network: settings and arithmetic."""

from __future__ import annotations

import json

import pytest
from method_ways import METHODS, defining
from prediction_report import (
    Predicted,
    Row,
    at_best,
    make_rows,
    of_all_ranks,
    order,
    ratios,
    reports_of,
    table,
    turned_round,
    uncut,
    verdict,
    words,
)

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import ask


@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("method", METHODS)
def test_what_defines_a_method_fits_the_ranks_and_leaves_no_two_methods_alike(
    method: str, num_ranks: int
) -> None:
    problem = Problem(512, 16, 128, element_bytes=4, mask=Mask(causal=True))
    given = defining(method, num_ranks)
    plan = ask(problem, num_ranks, method=method, ranks_per_node=4, **given).plan()
    assert plan.method == method
    if method in ("usp", "mesh-usp"):  # neither Ulysses alone nor what is outside of it
        assert 1 < given["ulysses"] < num_ranks


def row(name: str, measured: float, predicted: float) -> Row:
    halves = ((measured / 4, 3 * measured / 4), (predicted / 4, 3 * predicted / 4))
    return Row(name, (f"{name} tile=2x2",), *halves, measured, measured, 1.0)


ROWS = [row("mesh", 2.0, 4.0), row("ring", 5.0, 9.0), row("auto", 1.9, 3.6), row("usp", 1.8, 3.7)]


def test_ratios_are_to_the_mesh_and_pairs_predicted_alike_have_no_order() -> None:
    assert ratios(ROWS)["ring"] == pytest.approx((2.5, 2.25))
    assert turned_round(ROWS) == []  # auto and usp are within 3 %
    assert turned_round([*ROWS, row("other", 6.0, 8.0)]) == [("other", "ring")]
    found = verdict(ROWS)
    assert found["worst_ratio"] == ["ring", -0.1]
    assert found["ratios_near"]
    assert (found["fastest"], found["auto_behind"]) == ("usp", 0.056)
    assert words(found) == (
        "order: as predicted; ratios to mesh: ring is off most, -10.0%; auto: 5.6% behind usp"
    )
    assert not verdict([*ROWS, row("other", 1.0, 3.0)])["ratios_near"]


def test_an_order_counts_pairs_and_says_nothing_about_ratios() -> None:
    rows = [*ROWS, row("other", 6.0, 8.0), row("mesh uncut", 1.7, 4.1)]
    assert [one.name for one in at_best(rows)] == ["mesh", "ring", "auto", "usp", "other"]
    assert {one.name: one.step for one in uncut(rows)}["mesh"] == 1.7
    assert len(uncut(rows)) == 5
    found = order(at_best(rows))  # of ten pairs auto and usp are alike, other and ring turned
    assert (found["pairs"], found["agreement"]) == (9, round(1 - 2 / 9, 3))
    assert found["measured_order"] == ["usp", "auto", "mesh", "ring", "other"]
    assert found["predicted_order"] == ["auto", "usp", "mesh", "other", "ring"]
    assert words(found) == (
        "order: predicted, but not measured: other before ring; 8 of 9 pairs, Kendall's tau 0.778; "
        "measured usp < auto < mesh < ring < other; predicted auto < usp < mesh < other < ring; "
        "auto: 5.6% behind usp"
    )


def test_reports_go_as_far_as_all_ranks_have_come_and_no_line_is_read_half() -> None:
    first, step = json.dumps({"errors": {"mesh": 1e-3}}), json.dumps({"way": "mesh"})
    assert reports_of([f"{first}\n{step}\n", ""]) == []
    outputs = [f"NCCL says\n{first}\n{step}\n{step}\n", f'{first}\n{step}\n{{"way']
    found = reports_of(outputs)
    assert found == [{"errors": {"mesh": 1e-3}, "steps": [{"way": "mesh"}]}] * 2
    assert make_rows([Predicted("ring", ("ring",), (1.0, 4.0))], found) == []


def test_a_pass_takes_as_long_as_its_slowest_rank_and_a_row_is_the_median_of_rounds() -> None:
    def steps(*seconds: tuple[float, float]) -> dict[str, object]:
        usual = {"way": "mesh", "cpu": 0.5}
        return {"steps": [{**usual, "forward": f, "backward": b} for f, b in seconds]}

    reports = [
        steps((1.0, 3.0), (2.0, 2.0), (9.0, 4.0)),
        steps((1.5, 1.0), (1.0, 5.0), (1.0, 1.0)),
    ]
    (found,) = make_rows([Predicted("mesh", ("mesh",), (1.0, 4.0))], reports)
    assert found.measured == (2.0, 4.0)
    assert (found.least, found.most) == (4.5, 13.0)
    assert found.cpu == 1.0
    assert json.loads(of_all_ranks(reports)[1])["backward"] == [2.0, 5.0]
    assert len(table([found])) == 3
