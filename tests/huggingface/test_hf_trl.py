"""TRL's trainers on ranks: what they log and their parameters after a few steps are those of TRL on
one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.pool import WorkerPool

if TYPE_CHECKING:
    from support.tiny_trl import Trained

EXACT = 1e-5


def of_trl(rank: int, world_size: int, folder: str, names: list[str]) -> list[Trained]:
    from support.tiny_trl import RUNS, launched, train

    results = []
    for name in names:
        with launched(rank, 0 if world_size == 1 else world_size):
            results.append(train(RUNS[name].trainer(folder, None, world_size)))
    return results


def on_ranks(
    rank: int, world_size: int, folder: str, names: list[str], cp_size: int
) -> list[Trained]:
    from support.tiny_trl import RUNS, launched, train

    results = []
    for name in names:
        with launched(rank, world_size):
            trainer = RUNS[name].trainer(folder, cp_size, world_size // cp_size)
            if name in ("completions, packed", "policy"):  # and all that follows is as without
                assert str(trainer.doctor()).startswith("ranks compute what one process does")
            if "scores" not in name:
                kernel = trainer.cp.model.forward.__func__.__globals__["_ChunkedLogProbFunction"]
                assert kernel.apply.args[0] is trainer.cp  # which is asked for log-probabilities
            results.append(train(trainer))
            trainer.close()
    return results


def check(
    results: list[list[Trained]],
    wanted: list[Trained],
    names: list[str],
    lines: int | None = None,
) -> None:
    """`lines` of what was logged, or all."""
    for of_rank in results:
        for run, (logged, parameters), (true_logged, true_parameters) in zip(
            names, of_rank, wanted, strict=True
        ):
            assert len(logged) == len(true_logged)
            for line, true_line in zip(logged[:lines], true_logged[:lines], strict=True):
                if abs(true_line.get("rewards/margins", 1)) < 1e-6:  # of 0 and 0, by rounding
                    line = {**line, "rewards/accuracies": true_line["rewards/accuracies"]}
                assert line == pytest.approx(true_line, rel=EXACT, abs=EXACT), run
            assert parameters.keys() == true_parameters.keys()
            for name, p in parameters.items():
                wanted_p = true_parameters[name]
                assert (p - wanted_p).abs().max() <= EXACT * wanted_p.abs().max(), (run, name)


def on_two(pool: WorkerPool, folder: Path, names: list[str]) -> None:
    [wanted] = pool.run(of_trl, 1, str(folder), names)
    check(pool.run(on_ranks, 2, str(folder), names, 2), wanted, names)


@pytest.mark.slow  # on two by two ranks in every run
def test_fine_tuning_by_trl_on_two_ranks_is_that_of_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    on_two(
        model_pool,
        tmp_path,
        [
            "completions, padded",
            "wrapped",
            "padding-free",
            "assistant only, adapters",
        ],
    )


def test_preferences_and_scores_on_two_ranks_are_those_of_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    on_two(model_pool, tmp_path, ["preferences", "preferences, adapters", "scores"])


def on_two_by_two(
    pool: WorkerPool, folder: Path, names: list[str], lines: int | None = None
) -> None:
    """Data-parallel ranks of TRL evaluate and sample in their own way, so they are what it is
    compared with."""
    wanted = pool.run(of_trl, 2, str(folder), names)
    results = pool.run(on_ranks, 4, str(folder), names, 2)
    check(results[:2], wanted[0], names, lines)
    check(results[2:], wanted[1], names, lines)


def test_trainers_of_trl_on_two_by_two_ranks_are_those_of_two_processes(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    on_two_by_two(model_pool, tmp_path, ["completions, packed", "policy"])


@pytest.mark.slow
def test_all_trainers_of_trl_on_two_by_two_ranks_are_those_of_two_processes(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """And a policy on two, which is that of one."""
    names = ["completions, padded", "padding-free", "assistant only, adapters"]
    names += ["preferences", "preferences, precomputed", "scores"]
    on_two_by_two(model_pool, tmp_path, names)
    on_two(model_pool, tmp_path, ["policy"])


@pytest.mark.slow
def test_trainers_of_trl_with_sharded_parameters_are_those_of_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """FSDP2 on ranks."""
    names = ["completions", "preferences", "preferences, reference", "scores", "policy"]
    on_two(model_pool, tmp_path, [f"sharded {name}" for name in names])


@pytest.mark.slow
def test_a_policy_with_sharded_parameters_on_two_by_two_ranks_is_that_of_two_processes(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """Completions end early on some ranks, and all take part in each token's parameters."""
    on_two_by_two(model_pool, tmp_path, ["sharded policy"], lines=4)
