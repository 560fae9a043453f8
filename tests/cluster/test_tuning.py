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
                candidate = setting(direction, f"m{method}", seconds, number=number)
                every[direction].append(candidate)
                truth[candidate.key] = seconds * wrong * math.exp(rng.gauss(0, 0.04))
    return every, truth


def tuned(every: Every, truth: dict[str, float], most: int = 10) -> tuple[Tuning, int]:
    tuning, made = Tuning(every), 0
    while made < most and (pair := tuning.next()) is not None:
        assert pair[0].place == pair[1].place
        assert any(candidate.key not in tuning.known for candidate in pair)
        tuning.known |= {candidate.key: truth[candidate.key] for candidate in pair}
        made += 1
    return tuning, made


def test_ten_measurements_come_near_to_the_fastest() -> None:
    near = 0
    for seed in range(30):
        every, truth = made_up(seed)
        tuning, made = tuned(every, truth)
        tuned_pair, best = tuning.best(), Tuning(every, {**truth}).best()
        assert tuned_pair is not None
        assert best is not None
        assert made <= 10
        near += tuning.seconds(tuned_pair) <= 1.05 * Tuning(every, {**truth}).seconds(best)
    assert near >= 27


def test_the_predicted_best_is_measured_first_and_methods_are_corrected_by_what_was_measured() -> (
    None
):
    def numbered(direction: Direction, method: str, number: int, seconds: float) -> Scored:
        return setting(direction, method, seconds, number=number)

    every = {
        d: [
            numbered(d, "a", 0, 1.0),
            numbered(d, "a", 1, 1.01),
            numbered(d, "b", 0, 1.1),
            numbered(d, "c", 0, 9.0),
        ]
        for d in Direction
    }
    tuning = Tuning(every)
    pair = tuning.next()
    assert pair is not None
    assert [x.text for x in pair] == ["a number=0", "a number=0"]
    tuning.known |= {x.key: 3.0 for x in pair}  # three times as long as predicted
    pair = tuning.next()
    assert pair is not None
    assert [x.name for x in pair] == ["b", "b"]
    assert tuning.ratio(every[Direction.FORWARD][1]) == pytest.approx((3.0, True))
    assert tuning.ratio(pair[0]) == pytest.approx((3.0, False))
    tuning.known |= {x.key: 1.1 for x in pair}
    # Nothing of `a` promises less than 1.1 any more; `c` was predicted far slower.
    assert tuning.next() is None
    assert tuning.best() == pair


def test_what_cannot_run_is_passed_over_and_places_are_not_mixed() -> None:
    every = {d: [setting(d, "a", 1.0), setting(d, "b", 2.0, THERE)] for d in Direction}
    truth = {
        candidate.key: inf if candidate.name == "a" else 2.0
        for x in every.values()
        for candidate in x
    }
    tuning, made = tuned(every, truth)
    assert made == 2
    best = tuning.best()
    assert best is not None
    assert [candidate.name for candidate in best] == ["b", "b"]
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
            tuning.known |= {candidate.key: candidate.seconds for candidate in pair}
    return tuning, tried


def reasons(tuning: Tuning) -> list[str]:
    """The keys of what cannot run."""
    return [key for key, x in tuning.known.items() if isinstance(x, str)]


def test_a_refusal_is_noted_of_two_settings_that_only_together_cannot_run() -> None:
    every = {
        d: [setting(d, name, x) for name, x in (("a", 1.0), ("b", 1.2), ("c", 1.3))]
        for d in Direction
    }
    together, _ = refusing(every, lambda *pair: all(candidate.name == "a" for candidate in pair))
    best = together.best()
    assert best is not None
    assert sorted(candidate.name for candidate in best) == ["a", "b"]
    assert reasons(together) == [
        key_of((every[Direction.FORWARD][0], every[Direction.BACKWARD][0]))
    ]
    # One of the two alone is found by settings that have run, and nothing else is left out.
    alone, _ = refusing(every, lambda forward, backward: forward.name == "a")
    assert [key for key in reasons(alone) if " and " not in key] == [
        every[Direction.FORWARD][0].key
    ]
    best = alone.best()
    assert best is not None
    assert [candidate.name for candidate in best] == ["b", "a"]
    # Where nothing runs it ends, without a try of all pairs.
    many = {d: [setting(d, f"m{i}", 1.0) for i in range(20)] for d in Direction}
    nothing, tried = refusing(many, lambda *pair: True)
    assert nothing.best() is None
    assert tried <= 3 * 20


def test_contenders_hold_what_the_search_finds_and_more() -> None:
    problem = Problem(64, 2, 8, mask=Mask(causal=True))
    every = contenders(problem, 3, "hgx-h100")
    best = find_best(problem, 3, "hgx-h100", moves_tokens=False)
    for direction, candidates in every.items():
        assert len({candidate.key for candidate in candidates}) == len(candidates) >= 6
        assert len({candidate.name for candidate in candidates}) >= 4
        assert candidates == sorted(candidates, key=lambda candidate: candidate.seconds)
        assert candidates[0].seconds <= best.unmoved[direction].seconds * (1 + 1e-9)
        # Tokens stay where objects have them.
        assert len({candidate.place for candidate in candidates}) == 1
        texts = [candidate.text for candidate in candidates]
        assert "allgather-kv chunks=1x1" in texts  # not cut
        assert not any(text.startswith("mesh tile=1x3") for text in texts)  # the same, longer
        # Timelines are large, and not sent.
        assert not any(candidate.is_simulated for candidate in candidates)
    assert Tuning(every).next() is not None


def test_contenders_keep_the_options_and_refuse_what_no_method_takes() -> None:
    problem = Problem(16, 2, 8, mask=Mask(causal=True))
    for candidates in contenders(problem, 2, "hgx-h100", {"layout": "striped"}).values():
        assert all(
            candidate.options["layout"] == "striped" and candidate.stays for candidate in candidates
        )
    with pytest.raises(PlanError, match="no method has an option 'x'"):
        contenders(problem, 4, "hgx-h100", {"x": 1})
    with pytest.raises(PlanError, match="no method fits"):
        contenders(problem, 4, "hgx-h100", {"tile": (3, 3)})
