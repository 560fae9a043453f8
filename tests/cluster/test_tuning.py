"""Which settings are measured, and what is found: on times that are made up, and on settings of a
real search."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from mesh_attention import Mask, Problem
from mesh_attention.choose.auto import find_best
from mesh_attention.choose.scored import Place, Scored
from mesh_attention.choose.tuning import Tuning, contenders, key_of
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction

Every = dict[Direction, list[Scored]]
HERE, THERE = "zigzag", "striped"


def setting(
    direction: Direction, method: str, seconds: float, place: Place = HERE, **options: Any
) -> Scored:
    how: dict[str, Any] = {"peak_bytes": 0, "fits": True, "stays": True, "operations": 1}
    how["may_wait"] = False
    return Scored(direction, method, options, seconds, place=place, **how)


def made_up(seed: int) -> tuple[Every, dict[str, float]]:
    """Predictions of 8 methods, and times that differ from them by method most of all."""
    rng = random.Random(seed)
    every: Every = {}
    truth = {}
    for direction in Direction:
        every[direction] = []
        for method in range(8):
            base, wrong = math.exp(rng.gauss(0, 0.15)), math.exp(rng.gauss(0, 0.15))
            for number in range(rng.randint(1, 4)):
                seconds = base * math.exp(abs(rng.gauss(0, 0.05)))
                one = setting(direction, f"m{method}", seconds, number=number)
                every[direction].append(one)
                truth[one.key] = seconds * wrong * math.exp(rng.gauss(0, 0.04))
    return every, truth


def tuned(every: Every, truth: dict[str, float], most: int = 10) -> tuple[Tuning, int]:
    tuning, made = Tuning(every), 0
    while made < most and (pair := tuning.next()) is not None:
        assert pair[0].place == pair[1].place
        assert any(one.key not in tuning.measured for one in pair)
        tuning.measured |= {one.key: truth[one.key] for one in pair}
        made += 1
    return tuning, made


def test_ten_measurements_come_near_to_the_fastest() -> None:
    near = 0
    for seed in range(30):
        every, truth = made_up(seed)
        tuning, made = tuned(every, truth)
        found, best = tuning.best(), Tuning(every, truth).best()
        assert found is not None
        assert best is not None
        assert made <= 10
        near += tuning.seconds(found) <= 1.05 * Tuning(every, truth).seconds(best)
    assert near >= 27


def test_the_predicted_best_is_measured_first_and_methods_are_corrected_by_what_was_measured() -> (
    None
):
    def one(direction: Direction, method: str, number: int, seconds: float) -> Scored:
        return setting(direction, method, seconds, number=number)

    every = {
        d: [one(d, "a", 0, 1.0), one(d, "a", 1, 1.01), one(d, "b", 0, 1.1), one(d, "c", 0, 9.0)]
        for d in Direction
    }
    tuning = Tuning(every)
    pair = tuning.next()
    assert pair is not None
    assert [x.text for x in pair] == ["a number=0", "a number=0"]
    tuning.measured |= {x.key: 3.0 for x in pair}  # three times as long as predicted
    pair = tuning.next()
    assert pair is not None
    assert [x.name for x in pair] == ["b", "b"]
    assert tuning.ratio(every[Direction.FORWARD][1]) == pytest.approx((3.0, True))
    assert tuning.ratio(pair[0]) == pytest.approx((3.0, False))
    tuning.measured |= {x.key: 1.1 for x in pair}
    # Nothing of `a` promises less than 1.1 any more; `c` was predicted far slower.
    assert tuning.next() is None
    assert tuning.best() == pair


def test_what_cannot_run_is_passed_over_and_places_are_not_mixed() -> None:
    every = {d: [setting(d, "a", 1.0), setting(d, "b", 2.0, THERE)] for d in Direction}
    truth = {one.key: inf if one.name == "a" else 2.0 for x in every.values() for one in x}
    tuning, made = tuned(every, truth)
    assert made == 2
    best = tuning.best()
    assert best is not None
    assert [one.name for one in best] == ["b", "b"]
    nothing, _ = tuned(every, dict.fromkeys(truth, inf))
    assert nothing.best() is None


def refusing(every: Every, cannot: Callable[[Scored, Scored], bool]) -> tuple[Tuning, int]:
    """A tuning where some pairs cannot run and all else takes as long as predicted."""
    tuning, tried = Tuning(every), 0
    while (pair := tuning.next()) is not None:
        tried += 1
        if cannot(*pair):
            tuning.refuse(pair, "no")
        else:
            tuning.measured |= {one.key: one.seconds for one in pair}
    return tuning, tried


def test_a_refusal_is_noted_of_two_settings_that_only_together_cannot_run() -> None:
    every = {
        d: [setting(d, name, x) for name, x in (("a", 1.0), ("b", 1.2), ("c", 1.3))]
        for d in Direction
    }
    together, _ = refusing(every, lambda *pair: all(one.name == "a" for one in pair))
    best = together.best()
    assert best is not None
    assert sorted(one.name for one in best) == ["a", "b"]
    assert [*together.refused] == [
        key_of((every[Direction.FORWARD][0], every[Direction.BACKWARD][0]))
    ]
    assert inf not in together.measured.values()
    # One of the two alone is found by settings that have run, and nothing else is left out.
    alone, _ = refusing(every, lambda forward, backward: forward.name == "a")
    assert [key for key, x in alone.measured.items() if x == inf] == [
        every[Direction.FORWARD][0].key
    ]
    best = alone.best()
    assert best is not None
    assert [one.name for one in best] == ["b", "a"]
    # Where nothing runs it ends, without a try of all pairs.
    many = {d: [setting(d, f"m{i}", 1.0) for i in range(20)] for d in Direction}
    nothing, tried = refusing(many, lambda *pair: True)
    assert nothing.best() is None
    assert tried <= 3 * 20


def test_contenders_hold_what_the_search_finds_and_more() -> None:
    problem = Problem(64, 2, 8, mask=Mask(causal=True))
    every = contenders(problem, 3, "hgx-h100")
    best = find_best(problem, 3, "hgx-h100", moves_tokens=False)
    for direction, found in every.items():
        assert len({one.key for one in found}) == len(found) >= 6
        assert len({one.name for one in found}) >= 4
        assert found == sorted(found, key=lambda one: one.seconds)
        assert found[0].seconds <= best.unmoved[direction].seconds * (1 + 1e-9)
        assert len({one.place for one in found}) == 1  # tokens stay where objects have them
        assert any(one.text == "allgather-kv chunks=1x1" for one in found)  # not cut
        assert not any(one.text.startswith("mesh tile=1x3") for one in found)  # the same, longer
        assert not any(one.is_simulated for one in found)  # timelines are large, and not sent
    assert Tuning(every).next() is not None


def test_contenders_keep_the_options_and_refuse_what_no_method_takes() -> None:
    problem = Problem(16, 2, 8, mask=Mask(causal=True))
    for found in contenders(problem, 2, "hgx-h100", {"layout": "striped"}).values():
        assert all(one.options["layout"] == "striped" and one.stays for one in found)
    with pytest.raises(PlanError, match="no method has an option 'x'"):
        contenders(problem, 4, "hgx-h100", {"x": 1})
    with pytest.raises(PlanError, match="no method fits"):
        contenders(problem, 4, "hgx-h100", {"tile": (3, 3)})
