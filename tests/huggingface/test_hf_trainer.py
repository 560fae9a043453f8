"""`ContextParallelTrainer`: what it logs, its evaluation and its parameters after a few steps are
those of transformers' own Trainer on one process.

Needs 3 (loss normalisation), 9 (data-parallel by context-parallel ranks), 20 (evaluation) and 22
(checkpointing) as users of a Trainer meet them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from support.interpreted_liger import interpreted_liger
from support.pool import WorkerPool

if TYPE_CHECKING:
    from support.tiny_trainer import Trained

EXACT = 1e-5


def one_process(rank: int, world_size: int, folder: str, names: list[str]) -> list[Trained]:
    from support.tiny_trainer import RUNS, launched, train

    results = []
    for name in names:
        with launched(0, 0):
            results.append(train(RUNS[name].trainer(folder, None)))
    return results


def on_ranks(
    rank: int, world_size: int, folder: str, names: list[str], cp_size: int
) -> list[Trained]:
    from support.tiny_trainer import RUNS, launched, train

    results = []
    for name in names:
        with launched(rank, world_size):
            trainer = RUNS[name].trainer(folder, cp_size, world_size // cp_size)
            results.append(train(trainer))
            assert trainer._model_loss._head is not None or not name.startswith("LoRA")
            trainer.close()
    return results


def check(results: list[list[Trained]], wanted: list[Trained], exact: float = EXACT) -> None:
    for of_rank in results:
        for (logged, parameters), (true_logged, true_parameters) in zip(
            of_rank, wanted, strict=True
        ):
            assert logged == [pytest.approx(each, rel=exact) for each in true_logged]
            assert parameters.keys() == true_parameters.keys()
            for name, p in parameters.items():
                wanted_p = true_parameters[name]
                assert (p - wanted_p).abs().max() <= exact * wanted_p.abs().max(), name


ALONE = ["windows, accumulated", "LoRA, checkpoints", "packed, reentrant checkpoints"]
ALONE += ["smoothed", "experts"]


def test_a_trainer_on_two_ranks_is_that_of_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    [wanted] = model_pool.run(one_process, 1, folder, ALONE)
    check(model_pool.run(on_ranks, 2, folder, ALONE, 2), wanted)


def evaluated(rank: int, world_size: int, folder: str, cp_size: int | None) -> float:
    """The loss of batches of which every second has no target."""
    from support.tiny_trainer import RUNS, launched

    with launched(rank, world_size if cp_size else 0):
        trainer = RUNS["smoothed"].trainer(folder, cp_size)
        rows = [
            {"input_ids": list(range(5, 12)), "labels": [5, 7, 6, 9, 8, 11, 10]},
            {"input_ids": list(range(4, 11)), "labels": [-100] * 7},
        ]
        trainer.args.per_device_eval_batch_size = 1
        trainer.data_collator, trainer.compute_metrics = as_tensors, None
        loss: float = trainer.evaluate(rows * 2)["eval_loss"]
        if cp_size:
            trainer.close()
    return loss


def as_tensors(rows: list[dict[str, list[int]]]) -> dict[str, object]:
    import torch

    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def test_a_batch_without_targets_has_no_part_in_the_loss_of_an_evaluation(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    [wanted] = model_pool.run(evaluated, 1, str(tmp_path), None)
    if version("transformers") != "5.3.0":  # whose Trainer makes NaN of them itself
        assert wanted > 0.5
    alike = pytest.approx(wanted, rel=EXACT, nan_ok=True)
    assert model_pool.run(evaluated, 2, str(tmp_path), 2) == [alike] * 2


@pytest.mark.parametrize("ranks", [1, 4])
def test_evaluation_and_training_are_the_same_on_any_number_of_ranks(
    model_pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    """Need 20; more ranks than a batch has rows."""
    folder = str(tmp_path)
    [wanted] = model_pool.run(one_process, 1, folder, ["smoothed"])
    check(model_pool.run(on_ranks, ranks, folder, ["smoothed"], ranks), wanted)


def test_data_parallel_by_context_parallel_ranks_train_as_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """Need 9, two by two ranks."""
    folder = str(tmp_path)
    names = ["data-parallel", "streamed"]
    [wanted] = model_pool.run(one_process, 1, folder, names)
    check(model_pool.run(on_ranks, 4, folder, names, 2), wanted)


def with_liger(rank: int, world_size: int, folder: str, name: str) -> list[Trained]:
    from transformers.models.llama import modeling_llama

    with patch.dict(vars(modeling_llama)), interpreted_liger():
        results = on_ranks(rank, world_size, folder, [name], 2)
        assert modeling_llama.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    return results


@pytest.mark.slow
def test_the_kernel_of_liger_that_knows_positions_trains_as_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    name = "rotary kernel of Liger"
    [wanted] = model_pool.run(one_process, 1, str(tmp_path), [name])
    check(model_pool.run(with_liger, 2, str(tmp_path), name, seconds=300), wanted)


def streams_of(rank: int, world_size: int, folder: str) -> None:
    """The last batch of those evaluated is not full; a length, where one is said, may be wrong."""
    from support.tiny_trainer import RUNS, SizedStream, Stream, Texts, launched, packed

    texts = Texts(7)
    streams = [Stream(texts), SizedStream(texts, 7), SizedStream(texts, 10)]
    for cp_size in (2, 1):
        with launched(rank, world_size):
            trainer = RUNS["an epoch"].trainer(folder, cp_size, world_size // cp_size)
            wanted, *results = [trainer.evaluate(x) for x in (texts, *streams)]
            for name in ("eval_loss", "eval_rows", "eval_logits"):
                assert [result[name] for result in results] == [wanted[name]] * 3, (cp_size, name)
            trainer.data_collator = packed
            trainer.args.prediction_loss_only = True  # packs differ in length
            losses = [trainer.evaluate(x)["eval_loss"] for x in (texts, streams[0])]
            assert losses[0] == losses[1], cp_size
            if cp_size == 1:
                trainer.train_dataset = streams[1]
                trainer.train()
                assert trainer.state.global_step == 2
            trainer.close()


@pytest.mark.slow
def test_streams_are_evaluated_as_sets_and_train_for_epochs_where_they_have_a_length(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """On one data-parallel rank and on two."""
    model_pool.run(streams_of, 2, str(tmp_path))


def saved(rank: int, world_size: int, folder: str) -> bool:
    """A training that goes on from a checkpoint ends as if it had not been interrupted."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.tiny_trainer import RUNS, launched

    ends = []
    for checkpoint in (None, str(Path(folder) / "checkpoint-1")):
        with launched(rank, world_size):
            trainer = RUNS["saved"].trainer(folder, world_size)
            trainer.train(resume_from_checkpoint=checkpoint)
            logits = trainer.predict(trainer.eval_dataset).predictions
            collate = trainer.data_collator
            trainer.data_collator = lambda rows: collate(rows) | {"labels": None}  # noqa: B023
            unlabelled = trainer.predict(trainer.eval_dataset).predictions
            assert (unlabelled == logits).all()
            ends.append((dict(trainer.model.named_parameters()), torch.tensor(logits)))
            trainer.close()
    loaded = AutoModelForCausalLM.from_pretrained(str(Path(folder) / "checkpoint-2"))
    (whole, logits), (resumed, same) = ends
    assert loaded.config._attn_implementation != "mesh_attention"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole[name])
        assert torch.equal(parameter, resumed[name])
    assert torch.equal(logits, same)
    first = trainer.eval_dataset[0]["input_ids"]
    alone = loaded.eval()(first[None]).logits[0]
    return bool((logits[0, : len(first)] - alone).abs().max() < EXACT * alone.abs().max())


def test_models_are_saved_by_one_rank_and_trainings_go_on_from_checkpoints(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    assert model_pool.run(saved, 2, str(tmp_path)) == [True, True]
    files = {file.name for file in (tmp_path / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= files
