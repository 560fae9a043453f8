"""Loops with accelerate's `Accelerator` on data-parallel by context-parallel ranks: two lines more
than a plain loop, and losses and parameters of one process."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mesh_attention import MeshAttentionError
from support.pool import WorkerPool

if TYPE_CHECKING:
    from torch import Tensor

Trained = tuple[list[float], dict[str, "Tensor"]]


PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


def loop(way: str, collate: str, cp_size: int | None, dp_size: int = 1) -> Trained:
    """That of the page; `cp_size` None: a plain one, on one process."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from mesh_attention.huggingface.trainer_model import shard_on_cpu
    from support import tiny_trainer
    from support.tiny_models import make_model

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if way == "fsdp" and cp_size is not None:
        wraps = {"fsdp_version": 2, "transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}
        wraps |= {"auto_wrap_policy": "transformer_based_wrap"}
        assert shard_on_cpu(accelerator, SimpleNamespace(fsdp_plugin_args=wraps, fsdp_config={}))
    model = make_model("qwen3")
    texts, joined = tiny_trainer.Texts(16), getattr(tiny_trainer, collate)
    names: dict[str, Any] = {
        "accelerator": accelerator,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.2),
        "loader": DataLoader(texts, batch_size=4 // dp_size, collate_fn=joined),
        "losses": [],
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    [program] = [block for block in blocks if "AcceleratorContextParallel" in block]
    if cp_size is None:
        program = re.sub(r".*AcceleratorContextParallel.*\n", "", program)
        # With a cache transformers do not keep packed documents apart.
        program = program.replace("cp.loss(model, batch)", "model(**batch, use_cache=False).loss")
    exec(program + "        losses.append(loss.item())\n", names)
    if cp_size is not None:
        assert names["cp"].mesh["cp"].size() == cp_size
        names["cp"].close()
    state = accelerator.get_state_dict(names["model"])
    return names["losses"], {name: x.detach().clone() for name, x in state.items()}


def run(rank: int, world_size: int, way: str, collate: str, cp_size: int | None) -> Trained:
    from support.tiny_trainer import launched

    with launched(rank if cp_size else 0, world_size if cp_size else 0):
        return loop(way, collate, cp_size, world_size // (cp_size or 1))


@pytest.mark.parametrize(("way", "collate"), [("ddp", "packed"), ("fsdp", "padded")])
def test_loops_on_two_by_two_ranks_train_as_one_process(
    model_pool: WorkerPool, way: str, collate: str
) -> None:
    """Also several batches a step, as accelerate accumulates them."""
    [(losses, parameters)] = model_pool.run(run, 1, way, collate, None)
    for on_rank, (other_losses, other) in enumerate(model_pool.run(run, 4, way, collate, 2)):
        assert other_losses == pytest.approx(losses, rel=1e-5)
        if way == "fsdp" and on_rank:
            continue  # the first process has the whole state
        assert other.keys() == parameters.keys()
        for name, x in parameters.items():
            assert (other[name] - x).abs().max() <= 1e-5 * x.abs().max(), name


def refusals(rank: int, world_size: int) -> dict[str, str]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from mesh_attention.huggingface import AcceleratorContextParallel
    from support.tiny_models import PLAIN, make_model
    from support.tiny_trainer import launched

    answers = {}
    with launched(rank, world_size):
        dispatching = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        )
        plain, model = Accelerator(cpu=True), make_model("llama")
        prepared = plain.prepare(make_model("llama"))
        cp = AcceleratorContextParallel(plain, model)
        actions: dict[str, Any] = {
            "dispatch_batches": lambda: AcceleratorContextParallel(dispatching, prepared.module),
            "size": lambda: AcceleratorContextParallel(plain, prepared.module, cp_size=3),
            "prepared": lambda: AcceleratorContextParallel(plain, prepared),
            "not prepared": lambda: cp.loss(model, PLAIN.whole),
            "no labels": lambda: cp.loss(
                plain.prepare(model), {"input_ids": torch.ones(1, 8).long()}
            ),
        }
        for name, action in actions.items():
            with pytest.raises(MeshAttentionError) as raised:
                action()
            answers[name] = str(raised.value)
        cp.close()
    return answers


def test_accelerators_that_would_be_wrong_in_silence_are_refused(model_pool: WorkerPool) -> None:
    for answers in model_pool.run(refusals, 2):
        assert "dispatch_batches is not supported" in answers["dispatch_batches"]
        assert "cp_size=3 does not divide 2 processes" in answers["size"]
        assert "before it is wrapped" in answers["prepared"]
        assert "gradients would not be averaged" in answers["not prepared"]
        assert "the batch has no labels" in answers["no labels"]
