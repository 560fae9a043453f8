"""The example of GRPO with TRL runs, and learns the same on one and on two ranks."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest

from support.pool import WorkerPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


def run(rank: int, world_size: int, *arguments: str) -> str:
    from support.tiny_trainer import launched

    printed = io.StringIO()
    with (
        launched(rank, world_size),
        patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE))["main"](arguments)
    return printed.getvalue()


def vowels(printed: str) -> tuple[float, float]:
    last = printed.splitlines()[-1].split()
    return float(last[1]), float(last[6])


def test_grpo_learns_the_same_on_one_and_on_two_ranks(model_pool: WorkerPool) -> None:
    flags = ["--steps", "4", "--tokens", "8"]
    first, other = model_pool.run(run, 2, "--cp", "2", *flags)
    [alone] = model_pool.run(run, 1, "--cp", "1", *flags)
    assert vowels(first) == pytest.approx(vowels(alone), abs=1e-4)
    assert "1 data-parallel by 2 context-parallel ranks, 4 steps" in first
    assert "context-parallel" not in other


@pytest.mark.slow
def test_grpo_learns_on_data_parallel_by_context_parallel_ranks(model_pool: WorkerPool) -> None:
    first, *_ = model_pool.run(run, 4, "--cp", "2", "--steps", "20")
    before, after = vowels(first)
    assert after > before + 0.15
