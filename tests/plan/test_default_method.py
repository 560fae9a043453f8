"""The default method, `auto`: an answer to whatever is asked, which takes the options given, and
tokens where every other method would have them."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_attention.choose.ask import ask, choose, make_plan
from mesh_attention.choose.auto import find_default
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.methods.table import AUTO, DEFAULT_METHOD, METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.verify import verify

CAUSAL = Mask(causal=True)
WINDOW = Mask(causal=True, window=(3, 0))
MASKS = {
    "full": Mask(),
    "causal": CAUSAL,
    "window": WINDOW,
    "window on both sides": Mask(window=(2, 2)),
    "documents": Mask(causal=True, documents=(0, 5, 21, 48)),
    "prefix": Mask(causal=True, prefix=9),
    "slices": Mask(slices=(((0, 48), (0, 2), "full"), ((8, 48), (8, 48), "causal"))),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("ranks", [1, 4, 7])
def test_any_mask_has_an_answer_and_tokens_lie_as_for_any_method(ranks: int, mask: Mask) -> None:
    """Layers of one batch, some with a window, share its tokens: no choice may move them."""
    problem = Problem(48, 4, 8, num_kv_heads=2, mask=mask)
    plan = make_plan(problem, ranks)
    assert verify(plan) == []
    assert digest(plan) == digest(make_plan(problem, ranks, method=AUTO))
    by_name = make_plan(problem, ranks, method="mesh")
    assert (plan.shards, plan.devices) == (by_name.shards, by_name.devices)


def test_what_was_chosen_is_remembered_by_question_and_options_as_they_are_written() -> None:
    problem = Problem(64, 4, 8)
    assert choose(problem, 4) is choose(problem, 4, cluster="hgx-h100")
    assert choose(problem, 4, chunks=[1, 1]) is choose(problem, 4, chunks=[1, 1])
    assert choose(problem, 4, chunks=(1, 1)) is not choose(problem, 4, chunks="1x1")
    assert choose(problem, 4) is not choose(problem, 4, cluster="paper")


@pytest.mark.parametrize(("tokens", "kv_tokens"), [(3, 3), (48, 5), (5, 48), (1, 1)])
def test_few_tokens_and_other_keys_have_an_answer(tokens: int, kv_tokens: int) -> None:
    for mask in (Mask(), CAUSAL, WINDOW):
        problem = Problem(tokens, 6, 8, kv_tokens=kv_tokens, num_kv_heads=3, mask=mask)
        plan = make_plan(problem, 5)
        assert verify(plan) == []
        assert plan.shards == make_plan(problem, 5, method="mesh").shards


OPTIONS: dict[str, dict[str, Any]] = {
    "a tile": {"tile": "2x2"},
    "a tile of units": {"tile": (1, 2)},
    "slices": {"head_slices": (1, 1)},
    "a cap": {"max_memory_bytes": 1 << 20},
    "a way to combine": {"combine": "exchange"},
    "a team": {"team": 2},
    "a layout": {"layout": "striped"},
    "positions": {
        "layout": "listed",
        "stretches": [[(0, 12)], [(12, 24)], [(24, 40)], [(40, 48)]],
    },
    "contiguous shards": {"relayout": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_given_without_a_method_are_used(options: dict[str, Any]) -> None:
    asked = ask(Problem(48, 4, 8, mask=CAUSAL), 4, **options)
    for question in (asked, asked.backward or asked):
        known = METHODS[question.method].options()
        for name, value in options.items():
            assert getattr(question.setting, name) == known[name].read(value)
    assert verify(asked.plan()) == []


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_passes_behind_contiguous_shards_have_one_layout(mask: Mask) -> None:
    """Each pass alone would take another method, which lays out tokens otherwise."""
    problem = Problem(100, 4, 16, num_kv_heads=2, element_bytes=4, mask=mask)
    assert verify(make_plan(problem, 4, relayout=True)) == []


def test_a_rank_without_tokens_is_not_what_an_estimate_looks_at() -> None:
    problem = Problem(1, 64, 32, num_kv_heads=8, mask=CAUSAL)
    choice = find_default(problem, 24, "paper")
    runtimes = [choice.timeline(direction).runtime_seconds for direction in Direction]
    assert choice.seconds == pytest.approx(sum(runtimes), rel=0.05)


def test_where_the_best_method_refuses_an_option_the_next_that_takes_it_is_used() -> None:
    # Ulysses leaves a rank one KV head; slices of two need ranks that hold more.
    problem = Problem(64, 8, 8, mask=CAUSAL)
    assert make_plan(problem, 8).method == "ulysses"
    plan = make_plan(problem, 8, head_slices=(2, 4))
    assert verify(plan) == []
    assert plan.forward.setting["head_slices"] == "2+2"
    # Only the keys of a ring travel with their gradients and keep all heads.
    plan = make_plan(
        Problem(97, 4, 8, num_kv_heads=2, mask=CAUSAL), 6, head_slices=(1, 2), gradients="travel"
    )
    assert plan.method == "ring"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such": ({"tyle": (2, 2)}, "no method has an option 'tyle'; did you mean 'tile'"),
    "too small": ({"max_memory_bytes": 10}, "max_memory_bytes=10: no schedule fits"),
    "not a tile of these": ({"tile": (2, 3)}, "tile 2x3 has 6 cells but there are 4 ranks"),
    "not a pair": ({"tile": 4}, "tile=4"),
    "not a degree": ({"ulysses": 3}, "ulysses=3"),
    "not together": ({"team": 2, "inner": 2}, "no method has all of the options inner, team"),
    "nodes": ({"ranks_per_node": 0}, "ranks_per_node=0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_method_takes_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(Problem(48, 4, 8, mask=CAUSAL), 4, **options)


def test_shards_that_are_exchanged_anyway_leave_the_layout_free() -> None:
    problem = Problem(4096, 64, 128, num_kv_heads=8, mask=Mask(causal=True, window=(64, 0)))
    free, bound = (ask(problem, 16, relayout=relayout) for relayout in (True, False))
    assert (free.method, bound.method) == ("seen", "seen")
    assert free.plan().q_layout.kind == "contiguous"  # no row but the window's travels
    assert bound.plan().q_layout.kind == "zigzag"
    assert DEFAULT_METHOD == AUTO
