"""Whatever `verify` accepts runs and gives the right numbers: random damage, with the runtime as
the judge (`damaged_plans.py`)."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from damaged_plans import MUTATIONS, damaged, random_plan, verdict

from mesh_attention.plan.language.text import plan_text

SEEDS = 100
OF_A_SEED = 200  # 20,000 in all
SHORT_SEEDS = 3
OF_A_SHORT_SEED = 25


def campaign(seed: int, mutations: int) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for number in range(mutations):
        mutant, name = damaged(seed, number)
        try:
            verdicts[verdict(mutant)] += 1
        except Exception as error:
            message = f"seed {seed}, mutation {number}: {name}: {type(error).__name__} {error}"
            raise AssertionError(message) from error
    return verdicts


@pytest.mark.parametrize("seed", range(SHORT_SEEDS))
def test_whatever_verify_accepts_gives_the_right_numbers(seed: int) -> None:
    verdicts = campaign(seed, OF_A_SHORT_SEED)
    assert verdicts["refused"] > OF_A_SHORT_SEED // 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS))
def test_whatever_verify_accepts_gives_the_right_numbers_20000_times(seed: int) -> None:
    verdicts = campaign(seed, OF_A_SEED)
    assert verdicts["refused"] > OF_A_SEED // 3
    assert verdicts["accepted"] > 0


def test_every_mutation_finds_something_to_change_in_some_plan() -> None:
    changed = set()
    for seed in range(12):
        rng = Random(seed)
        lines = plan_text(random_plan(rng)).splitlines()
        for mutation in MUTATIONS:
            new = mutation(rng, list(lines))
            if new is not None and new != lines:
                changed.add(mutation)
    assert changed == set(MUTATIONS)
