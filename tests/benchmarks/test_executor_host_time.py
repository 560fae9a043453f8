"""The executor's own time is measured with kernels that do nothing: they must be let through."""

from __future__ import annotations

import pytest
import torch
from executor_host_time import CUTS, host_microseconds

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.plan import Direction


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_can_be_timed(cut: str, direction: Direction) -> None:
    problem = Problem(256, 16, 8, mask=Mask(causal=True))
    plan = make_plan(problem, 4, method="mesh", tile=(2, 2), **CUTS[cut])
    found, count = host_microseconds(plan, direction, torch.device("cpu"), repeats=10)
    assert found > 0
    assert count >= 5
