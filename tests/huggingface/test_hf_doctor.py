"""Models of transformers beside one process: `doctor` and what untested models do by themselves,
and `generate`, which works on whole sequences at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_attention import MeshAttentionError
from support.pool import WorkerPool


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises((MeshAttentionError, AttributeError)) as raised:
        action()
    return str(raised.value)


def generating(rank: int, world_size: int) -> list[Any]:
    import torch

    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import PLAIN, make_model, on_ranks

    model = make_model("gemma2").eval()
    ids = PLAIN.whole["input_ids"]
    how = {"max_new_tokens": 5, "do_sample": False}
    before = model.generate(ids, **how)
    with ModelContextParallel(model) as cp:
        loss = on_ranks(cp, model, PLAIN)[0].value
        meanwhile = model.generate(ids, **how)
        again = on_ranks(cp, model, PLAIN)[0].value
        part = cp.shard_batch(input_ids=ids, advantages=torch.ones(ids.shape))
        assert model(**part.to("cpu").model_inputs()).logits.shape[1] == part.advantages.shape[1]
        assert "it has input_ids, position_ids, documents, advantages" in refused(lambda: part.x)
        messages = [
            refused(lambda: model.generate(part.input_ids)),
            refused(lambda: copy.deepcopy(model).generate(ids)),
        ]
    after = model.generate(ids, **how)
    assert "generate" not in vars(model)
    return [torch.equal(before, meanwhile) and torch.equal(before, after), loss == again, *messages]


def test_models_generate_whole_sequences_in_the_middle_of_training(model_pool: WorkerPool) -> None:
    for same, goes_on, of_shards, of_copies in model_pool.run(generating, 2):
        assert same
        assert goes_on
        assert "this is a rank's part" in of_shards
        assert "attention over ranks needs to know its batch" in of_copies
        assert "call it in `with cp.own_attention():`" in of_copies


def compared(rank: int, world_size: int) -> list[Any]:
    """An untested model that is exact, and one that mixes tokens where no class name says so."""
    import torch

    from mesh_attention import doctor
    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import ALL, make_model

    model = make_model("llama", "sdpa")
    model.config.model_type = "new"

    def step(model: Any, whole: dict[str, Any]) -> Any:
        part = cp.shard_batch(**whole)
        logits = model(**part.model_inputs()).logits
        return cp.cross_entropy(logits, part.labels, reduce="sum")

    def add_up(model: Any) -> None:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)

    answers: list[Any] = []
    with ModelContextParallel(model, untested=True) as cp:
        for batch in ALL[1:]:
            report = doctor(step, batch.whole, model, cp, reduce_gradients=add_up)
            answers.append(str(report.cause))
    for wide in (model, copy.deepcopy(model).double()):  # whose norms compute in float32
        with ModelContextParallel(wide, untested=True) as cp:
            assert step(wide, ALL[0].whole).loss.requires_grad
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, x: x + x.roll(1, 1))
    with ModelContextParallel(model, untested=True) as cp:
        answers.append(refused(lambda: cp.shard_batch(**ALL[0].whole)))
        answers.append(all(p.grad is None for p in model.parameters()))
    return answers


def test_untested_models_are_compared_with_one_process_by_themselves(
    model_pool: WorkerPool,
) -> None:
    """Batches of all kinds: padded on both sides, packed, plain."""
    for *right, wrong, is_clean in model_pool.run(compared, 2):
        assert all("ranks compute what one process does" in words for words in right), right
        assert "LlamaForCausalLM is untested, and on ranks it is not the model" in wrong
        assert "model.layers.0.mlp gives other numbers after model.layers.0.mlp.down_proj" in wrong
        assert is_clean


def of_trainer(rank: int, world_size: int, folder: str) -> list[Any]:
    """Before training, after it (so wrapped by DDP), and where a subclass shifts labels again."""
    from torch.nn.functional import cross_entropy

    from mesh_attention.huggingface import ContextParallelTrainer
    from support.tiny_trainer import RUNS, launched

    class Own(ContextParallelTrainer):
        """Whose losses are made of whole batches."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).loss

    with launched(rank, world_size):
        trainer = RUNS["data-parallel"].trainer(folder, 2, world_size // 2)
        answers = [str(trainer.doctor())]
        trainer.train()
        answers.append(str(trainer.doctor()))

        def compute_loss(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(**inputs.model_inputs()).logits
            return cross_entropy(logits[:, :-1].flatten(0, 1), inputs.labels[:, 1:].flatten())

        trainer.compute_loss = compute_loss
        answers.append(str(trainer.doctor()))
        trainer.close()
        collate, data = trainer.data_collator, trainer.train_dataset
        own = Own(trainer.model, trainer.args, collate, data, cp_size=2)
        answers.append(str(own.doctor()))
        own.close()
    return answers


def test_a_trainer_asks_the_doctor_before_and_after_training(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    for before, after, shifted, own in model_pool.run(of_trainer, 4, str(tmp_path)):
        assert before.startswith("ranks compute what one process does")
        assert after.startswith("ranks compute what one process does")
        assert shifted.startswith("labels are shifted twice")
        assert own.startswith("ranks compute what one process does")
