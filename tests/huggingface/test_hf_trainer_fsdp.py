"""`ContextParallelTrainer` with FSDP2: parameters after a few steps are those of transformers' own
Trainer on one process, and no logits are made on the way.

Needs 3 (loss normalisation), 9 (data-parallel by context-parallel ranks), 22 (checkpointing).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from test_hf_trainer import check, one_process

from support.pool import WorkerPool

if TYPE_CHECKING:
    from support.tiny_trainer import Trained


def on_ranks(
    rank: int, world_size: int, folder: str, names: list[str], cp_size: int
) -> list[Trained]:
    from torch.distributed.fsdp import FSDPModule

    from mesh_attention.train.keep_attention import KeepAttention
    from support.tiny_trainer import RUNS, launched, train

    results = []
    for name in names:
        with launched(rank, world_size):
            trainer = RUNS[name].trainer(folder, cp_size, world_size // cp_size)
            lengths: set[int] = set()

            def look(module: Any, args: Any, outputs: Any, lengths: Any = lengths) -> None:
                if module.training:
                    lengths.add(outputs.logits.shape[1])

            trainer.cp.model.register_forward_hook(look)
            if RUNS[name].from_init:
                trainer.train()  # and all of it once more, from the beginning
            results.append(train(trainer))
            assert isinstance(trainer.model, FSDPModule)
            if RUNS[name].loss is None and not RUNS[name].from_init:
                assert lengths == {1}  # of logits; those of batches are 2 or more
            kept = [x for module in trainer.cp.model.modules() for x in vars(module).values()]
            contexts = [getattr(x, "keywords", {}).get("context_fn") for x in kept]
            has_kept = any(isinstance(context, KeepAttention) for context in contexts)
            assert has_kept == ("checkpoints" in name)
            if trainer.args.neftune_noise_alpha is not None:  # of tokens of a whole row
                assert 8 <= trainer._noise.length <= 11
            trainer.close()
    return results


@pytest.mark.parametrize(
    ("cp_size", "names"),
    [
        (2, ["tied, softcap, checkpoints of accelerate", "own loss"]),
        (4, ["LoRA, checkpoints of transformers"]),
    ],
)
def test_four_sharded_ranks_train_as_one_process(
    model_pool: WorkerPool, tmp_path: Path, cp_size: int, names: list[str]
) -> None:
    folder = str(tmp_path)
    [wanted] = model_pool.run(one_process, 1, folder, names)
    check(model_pool.run(on_ranks, 4, folder, names, cp_size), wanted)


def test_models_that_are_made_anew_or_kept_on_the_host_train_as_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    folder, names = str(tmp_path), ["model_init", "offloaded"]
    [wanted] = model_pool.run(one_process, 1, folder, names)
    check(model_pool.run(on_ranks, 2, folder, names, 2), wanted)


def test_bf16_is_near_to_that_of_one_process(model_pool: WorkerPool, tmp_path: Path) -> None:
    folder, names = str(tmp_path), ["bf16, noise"]
    [wanted] = model_pool.run(one_process, 1, folder, names)
    check(model_pool.run(on_ranks, 2, folder, names, 2), wanted, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled", "compiled, FSDP2", "compiled by inductor"])
def test_a_compiled_model_trains_as_one_process(
    model_pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    from test_hf_trainer import on_ranks

    [wanted] = model_pool.run(one_process, 1, str(tmp_path), [name])
    check(model_pool.run(on_ranks, 2, str(tmp_path), [name], 2, seconds=300), wanted)


def saved(rank: int, world_size: int, folder: str) -> None:
    """A training that goes on from a checkpoint ends as if it had not been interrupted."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from support.tiny_trainer import RUNS, launched

    ends = []
    kind = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}  # old transformers read no fsdp_config
    for checkpoint in (None, str(Path(folder) / "checkpoint-1")):
        with launched(rank, world_size), patch.dict(os.environ, kind):
            trainer = RUNS["FSDP2, whole"].trainer(folder, world_size)
            trainer.train(resume_from_checkpoint=checkpoint)
            parameters = trainer.model.named_parameters()
            ends.append({name: parameter.full_tensor() for name, parameter in parameters})
            trainer.close()
    whole, resumed = ends
    for name, parameter in whole.items():
        assert torch.equal(parameter, resumed[name]), name
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(str(Path(folder) / "checkpoint-2"))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_sharded_trainings_go_on_from_whole_checkpoints_bit_by_bit(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    model_pool.run(saved, 2, str(tmp_path))


def moved(rank: int, world_size: int, folder: str, checkpoint: str | None) -> Trained:
    from support.tiny_trainer import RUNS, launched, train

    kind = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    with launched(rank, world_size), patch.dict(os.environ, kind):
        trainer = RUNS["FSDP2, in shards"].trainer(folder, world_size)
        trainer.train = partial(trainer.train, resume_from_checkpoint=checkpoint)
        result = train(trainer)
        trainer.close()
    return result


def test_a_sharded_checkpoint_of_four_ranks_goes_on_on_two(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    """The optimizer's state too, of which some ranks have no row."""
    wanted = model_pool.run(moved, 4, str(tmp_path), None)
    assert (tmp_path / "checkpoint-1/pytorch_model_fsdp_0/.metadata").is_file()
    results = model_pool.run(moved, 2, str(tmp_path), str(tmp_path / "checkpoint-1"))
    for (logged, parameters), (true_logged, true_parameters) in zip(
        results, wanted[:2], strict=True
    ):
        assert logged[-1] == pytest.approx(true_logged[-1], rel=1e-5)
        for name, x in true_parameters.items():
            assert (parameters[name] - x).abs().max() <= 1e-5 * x.abs().max(), name
