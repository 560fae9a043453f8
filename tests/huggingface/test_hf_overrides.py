"""A `compute_loss` that was written for one process is right on ranks: it sees whole batches and
whole outputs. Labels that are shifted and cut made a token accuracy of 0.125 for a true 1.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.pool import WorkerPool

EXACT = 1e-5


def trainers() -> tuple[Any, Any, Any]:
    """One of transformers, and two of ours, each with the same loss."""
    from transformers import Trainer

    from mesh_attention.huggingface import ContextParallelTrainer
    from mesh_attention.huggingface.trainer import ContextParallelMixin

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        labels = inputs["labels"]
        loss, outputs = super(type(self), self).compute_loss(
            model, inputs, return_outputs=True, **more
        )
        shown, wanted = outputs.logits[:, :-1], labels[:, 1:]
        right = (shown.argmax(-1) == wanted)[wanted != -100]
        self.seen.append((*labels.shape, right.float().mean().item()))
        loss = loss + 1e-3 * outputs.logits[inputs["attention_mask"].bool()].square().mean()
        return (loss, outputs) if return_outputs else loss

    own = {"compute_loss": compute_loss, "seen": []}
    plain = type("Written", (Trainer,), dict(own))
    inherited = type("Inherited", (ContextParallelTrainer,), dict(own))
    mixed = type("Mixed", (ContextParallelMixin, Trainer), dict(own))
    return plain, inherited, mixed


def results(trainer: Any) -> Any:
    import torch

    trainer.seen.clear()
    trainer.train()
    trainer.evaluate()
    names = ("loss", "grad_norm", "train_loss", "eval_loss", "eval_logits", "eval_rows")
    logged = [{n: x for n, x in line.items() if n in names} for line in trainer.state.log_history]
    first = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return list(trainer.seen), logged, first


def written(rank: int, world_size: int, folder: str, cp_size: int | None) -> list[Any]:
    from unittest.mock import patch

    from support import tiny_trainer

    plain, *ours = trainers()
    run = tiny_trainer.Run("llama", num_examples=4, arguments={"gradient_accumulation_steps": 2})
    of_ranks = []
    for kind in [plain] if cp_size is None else ours:
        name = "Trainer" if cp_size is None else "ContextParallelTrainer"
        processes = 0 if cp_size is None else world_size
        with tiny_trainer.launched(rank, processes), patch.object(tiny_trainer, name, kind):
            trainer = run.trainer(folder, cp_size)
            of_ranks.append(results(trainer))
            if cp_size is not None:
                trainer.close()
    return of_ranks


def test_an_override_of_compute_loss_sees_what_it_sees_on_one_process(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    [[(seen, logged, parameters)]] = model_pool.run(written, 1, str(tmp_path), None)
    for of_rank in model_pool.run(written, 2, str(tmp_path), 2):
        for own_seen, own_logged, own_parameters in of_rank:
            assert own_seen == [pytest.approx(x) for x in seen]
            assert own_logged == [pytest.approx(x, rel=EXACT) for x in logged]
            assert (own_parameters - parameters).abs().max() < EXACT * parameters.abs().max()


def whole_models(rank: int, world_size: int) -> list[str]:
    """The same model again after each failure."""
    import torch

    from mesh_attention.errors import MeshAttentionError
    from mesh_attention.huggingface import ModelContextParallel
    from mesh_attention.huggingface.whole_model import WholeModel
    from support.tiny_models import RIGHT, make_model

    model, alone = make_model("qwen3"), make_model("qwen3")
    whole = WholeModel(ModelContextParallel(model))
    wanted = alone(**RIGHT.whole, output_hidden_states=True)
    faults = []
    ids = RIGHT.whole["input_ids"]
    wrong = RIGHT.whole | {"input_ids": ids.flip(1) if rank else ids}
    others: list[dict[str, Any]] = [
        RIGHT.whole | {"pixel_values": torch.zeros(1, 3)},
        {"inputs_embeds": torch.zeros(2, 3, 36)},
        wrong,
    ]
    for inputs in others:
        with pytest.raises(MeshAttentionError) as error:
            model(**inputs)
        faults.append(str(error.value))
    out = model(**RIGHT.whole, output_hidden_states=True)
    real = RIGHT.real
    assert torch.allclose(out.loss, wanted.loss, rtol=EXACT)
    for mixed, true in zip(out.hidden_states, wanted.hidden_states, strict=True):
        assert torch.allclose(mixed[real], true[real], atol=1e-4)
    prompt = {"input_ids": RIGHT.whole["input_ids"][:1, : 5 + rank]}  # ranks may differ
    for _ in range(2):
        generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(generated, alone.generate(**prompt, max_new_tokens=4, do_sample=False))
        assert torch.allclose(model(**RIGHT.whole).loss, wanted.loss, rtol=EXACT)
    whole.close()
    assert torch.allclose(model(**RIGHT.whole).loss, wanted.loss, rtol=EXACT)
    return faults


def test_a_whole_model_refuses_by_name_and_goes_on(model_pool: WorkerPool) -> None:
    for picture, embedded, different in model_pool.run(whole_models, 2):
        assert "pixel_values was given to the model" in picture
        assert "inputs_embeds was given" in embedded
        assert "rank 1" in different or "rank 0" in different


def refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from trl import GRPOTrainer, KTOTrainer

    from mesh_attention.errors import MeshAttentionError
    from mesh_attention.huggingface.trainer import ContextParallelMixin
    from support.tiny_trl import RUNS, TrlRun, launched

    generating: Any = type("Generating", (ContextParallelMixin, GRPOTrainer), {})
    untested: Any = type("Untested", (ContextParallelMixin, KTOTrainer), {})
    messages = {}
    with pytest.raises(MeshAttentionError) as error:
        type("Last", (KTOTrainer, ContextParallelMixin), {})
    messages["Last"] = str(error.value)
    for kind in (generating, untested):
        with pytest.raises(MeshAttentionError) as error:
            kind()
        messages[kind.__name__] = str(error.value)
    policy = RUNS["policy"].arguments
    runs = {
        "vllm": TrlRun("grpo", 4, arguments={"use_vllm": True}),
        "groups": TrlRun("grpo", 2, arguments=policy | {"num_generations": 8, "beta": 0.0}),
        "experts": TrlRun("sft", model="gpt_oss"),
    }
    for name, run in runs.items():
        with launched(rank, world_size), pytest.raises(MeshAttentionError) as error:
            run.trainer(folder, 2)
        messages[name] = str(error.value)
    return messages


def test_what_trl_cannot_do_on_ranks_is_refused_by_name(
    model_pool: WorkerPool, tmp_path: Path
) -> None:
    for messages in model_pool.run(refused, 2, str(tmp_path)):
        assert "class Last(ContextParallelMixin, ...)" in messages["Last"]
        assert "ContextParallelGRPOTrainer" in messages["Generating"]
        assert "KTOTrainer of TRL has not been shown" in messages["Untested"]
        assert "use_vllm is not supported" in messages["vllm"]
        assert "multiple of the 8 generations" in messages["groups"]
        assert "router_aux_loss_coef=0.0" in messages["experts"]
