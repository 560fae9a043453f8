"""Need 27: models of transformers attend over ranks by `AttentionInterface`, and their losses,
logits and gradients are those of one process with its own eager attention.

Needs 11 and 20 too: positions under any layout, and logits that are put together in order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mesh_attention.huggingface.models import SHOWN
from support.pool import WorkerPool

EXACT = 1e-5


def errors(rank: int, world_size: int, names: list[str], in_turn: bool) -> dict[str, float]:
    """Relative, of everything, for batches of all kinds, or for two kinds in turn."""
    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import ALL, make_model, on_one_process, on_ranks

    found: dict[str, float] = {}
    for turn, name in enumerate(names):
        model = make_model(name)
        batches = [ALL[turn % 4], ALL[(turn + 2) % 4]] if in_turn else ALL
        wanted = [results(model, *on_one_process(model, batch)) for batch in batches]
        with ModelContextParallel(model) as cp:
            for number, batch in enumerate(batches):
                mean, logits = on_ranks(cp, model, batch)
                parts = results(model, mean.loss, logits)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                parts["loss"] = mean.value
                for what, true in wanted[number].items():
                    a, b = parts[what], true
                    if what == "logits":
                        a, b = a[batch.real], b[batch.real]
                    worst = (a - b).abs().max() / b.abs().max()
                    found[f"{name}, batch {number}, {what}"] = worst.item()
    return found


def results(model: Any, loss: Any, logits: Any) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), **grads}


def check(found: list[dict[str, float]]) -> None:
    for of_rank in found:
        assert of_rank
        assert {what: worst for what, worst in of_rank.items() if not worst < EXACT} == {}


def test_every_model_has_losses_logits_and_gradients_of_one_process(model_pool: WorkerPool) -> None:
    """Each model with two of four kinds of batch: plain and padded left, or right and packed."""
    check(model_pool.run(errors, 2, [*SHOWN], True))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(4, "gemma3_text", marks=pytest.mark.slow),
        pytest.param(6, "gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_more_ranks_change_nothing(model_pool: WorkerPool, ranks: int, name: str) -> None:
    """More than there are key heads, or documents, or windows' worth of tokens."""
    check(model_pool.run(errors, ranks, [name], False))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_model_on_every_number_of_ranks(model_pool: WorkerPool, ranks: int) -> None:
    check(model_pool.run(errors, ranks, [*SHOWN], False, seconds=300))


def wrapped(rank: int, world_size: int, way: str) -> dict[str, float]:
    """Errors of a step where the model is wrapped or compiled, and checkpointed."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import PACKED, make_model, on_one_process

    plain = make_model("gemma3_text")
    wanted = results(plain, *on_one_process(plain, PACKED))
    plain.zero_grad()
    with ModelContextParallel(plain) as cp:
        model: Any = plain
        if way == "fsdp":
            for layer in plain.model.layers:
                fully_shard(layer)
            fully_shard(plain)
        else:
            model = DistributedDataParallel(plain)
            how = {"context_fn": cp.keep_attention(offload=True)} if way == "ddp" else {}
            plain.gradient_checkpointing_enable({"use_reentrant": False, **how})
        if way == "ddp":
            for layer in plain.model.layers:
                layer.mlp.forward = cp.tiled(layer.mlp.forward, tokens=3)
        if way == "compile":
            model = torch.compile(model, backend="eager")
        part = cp.shard_batch(**PACKED.whole)
        logits = model(**part.model_inputs()).logits
        # Another batch is in flight meanwhile: checkpoints find their own again.
        plain(**cp.shard_batch(input_ids=PACKED.whole["input_ids"][:, :11]).model_inputs())
        reduce: Any = "fsdp" if way == "fsdp" else "ddp"
        mean = cp.cross_entropy(logits, part.labels, reduce=reduce)
        mean.loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": (mean.value - wanted["loss"]).abs() / wanted["loss"]}
    for name, parameter in plain.named_parameters():
        grad = parameter.grad.full_tensor() if way == "fsdp" else parameter.grad
        found[name] = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
    return {name: worst.item() for name, worst in found.items()}


@pytest.mark.parametrize("way", ["ddp", "fsdp", pytest.param("compile", marks=pytest.mark.slow)])
def test_models_may_be_wrapped_checkpointed_and_compiled(model_pool: WorkerPool, way: str) -> None:
    """Needs 9 and 22."""
    check(model_pool.run(wrapped, 2, way))
