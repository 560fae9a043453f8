"""Whatever people write, it is planned or refused in a sentence: no other error, and no silence."""

from __future__ import annotations

from typing import Any

import pytest
from any_arguments import check_batch, check_plan

from support.property import for_all


@pytest.mark.parametrize("check", [check_plan, check_batch])
def test_what_is_not_planned_is_refused_in_a_sentence(check: Any) -> None:
    for_all(check, 120, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_plan, check_batch])
def test_many_that_are_not_planned_are_refused_in_a_sentence(check: Any) -> None:
    for_all(check, 5000, seed=2)
