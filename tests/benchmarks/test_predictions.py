"""`benchmarks/predicted_against_measured.py` without a network: settings and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from peer_contestants import entry_of
from predicted_against_measured import AUTO, contestants, seconds_of, verdict, words_of

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import ask


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_what_defines_a_method_fits_the_ranks_and_leaves_no_two_methods_alike(
    num_ranks: int,
) -> None:
    problem = Problem(512, 16, 128, element_bytes=4, mask=Mask(causal=True))
    methods = [text for text in contestants(num_ranks) if text != AUTO]
    plans = []
    for text in methods:
        options: dict[str, Any] = dict(entry_of(text).options)
        plans.append(ask(problem, num_ranks, ranks_per_node=4, **options).plan())
        if plans[-1].method in ("usp", "mesh-usp"):  # neither Ulysses alone nor what is outside it
            assert 1 < options["ulysses"] < num_ranks
    assert [plan.method for plan in plans] == [text.partition(",")[0] for text in methods]


SECONDS = {"mesh": (2.0, 4.0), "ring": (5.0, 9.0), "auto": (1.9, 3.6), "usp": (1.8, 3.7)}


def test_ratios_are_to_the_mesh_and_pairs_predicted_alike_have_no_order() -> None:
    judged = verdict(SECONDS)
    assert judged["ratios"]["ring"] == pytest.approx((2.5, 2.25))
    assert judged["worst_ratio"] == ["ring", -0.1]
    assert judged["ratios_near"]
    assert not verdict({**SECONDS, "other": (1.0, 3.0)})["ratios_near"]
    assert (judged["turned_round"], judged["pairs"]) == ([], 5)  # auto and usp are within 3 %
    assert (judged["fastest"], judged["auto_behind"]) == ("usp", 0.056)


def test_pairs_that_are_turned_round_are_counted_and_named() -> None:
    judged = verdict({**SECONDS, "other": (6.0, 8.0)})
    # Of ten pairs auto and usp are alike, other and ring turned.
    assert judged["turned_round"] == [("other", "ring")]
    assert (judged["pairs"], judged["agreement"]) == (9, round(1 - 2 / 9, 3))
    assert words_of(judged).splitlines()[1:] == [
        "order: predicted, but not measured: other before ring; 8 of 9 pairs, Kendall's tau 0.778",
        "measured usp < auto < mesh < ring < other",
        "predicted auto < usp < mesh < other < ring",
        "auto: 5.6% behind usp",
    ]


def test_a_method_that_is_wrong_has_no_verdict_and_one_with_the_same_plan_has_its_times() -> None:
    mesh = {"both_ms": 2000.0, "predicted_ms": 4000.0}
    rows: dict[str, dict[str, Any]] = {"mesh,tile=(2, 4)": mesh}
    rows[AUTO] = {"same_as": "mesh,tile=(2, 4)"}
    assert seconds_of({"contestants": rows}) == {"mesh": (2.0, 4.0), AUTO: (2.0, 4.0)}
    with pytest.raises(SystemExit, match="error: ring: wrong"):
        seconds_of({"contestants": {**rows, "ring": {"refused": "wrong"}}})
    with pytest.raises(SystemExit, match="error: late"):
        seconds_of({"not_run": "late"})
