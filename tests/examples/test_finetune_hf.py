"""The examples of fine-tuning with transformers run, and learn the same on any number of ranks.

It runs in processes that have imported transformers already; the group is theirs.
"""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest

from support.pool import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(rank: int, world_size: int, *arguments: str, name: str = "finetune_hf.py") -> str:
    from support.tiny_trainer import launched

    printed = io.StringIO()
    with (
        launched(rank, world_size),
        patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / name))["main"](arguments)
    return printed.getvalue()


def losses(printed: str) -> tuple[float, float]:
    last = printed.splitlines()[-1].split()
    return float(last[4]), float(last[6])


@pytest.mark.slow
def test_fine_tuning_learns_the_same_on_one_and_on_two_ranks(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    flags = ["--steps", "2", "--tokens", "500", "--output", str(tmp_path)]
    first, other = model_pool.run(run, 2, "--cp", "2", *flags, "--checkpointing")
    assert not other
    [alone] = model_pool.run(run, 1, "--cp", "1", *flags)
    before, after = losses(first)
    assert (before, after) == pytest.approx(losses(alone), abs=2e-5)
    assert after < before - 0.3
    assert "1 data-parallel by 2 context-parallel ranks, 2 steps" in first
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_fine_tuning_trains_adapters_on_data_parallel_by_context_parallel_ranks(
    model_pool: WorkerPool,
) -> None:
    flags = ["--steps", "10", "--cp", "2", "--lora"]
    first, *others = model_pool.run(run, 4, *flags)
    assert not any(others)
    before, after = losses(first)
    assert after < before - 0.1


def run_sft(rank: int, world_size: int, *arguments: str) -> str:
    return run(rank, world_size, *arguments, name="sft_fsdp2.py")


@pytest.mark.slow
def test_supervised_fine_tuning_of_a_sharded_model_learns_and_saves_all_of_it(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    first, other = model_pool.run(run_sft, 2, "--steps", "4", "--output", str(tmp_path))
    assert not other
    before, after = losses(first)
    assert after < before - 0.5
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (256, 64)
