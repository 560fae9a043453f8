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


def errors(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """Relative, of everything, for batches of all kinds."""
    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import ALL, make_model, on_one_process, on_ranks

    found: dict[str, float] = {}
    for name in names:
        model = make_model(name)
        wanted = [results(model, *on_one_process(model, batch)) for batch in ALL]
        with ModelContextParallel(model) as cp:
            for number, batch in enumerate(ALL):
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
    check(model_pool.run(errors, 2, [*SHOWN]))


@pytest.mark.parametrize(("ranks", "name"), [(4, "gemma3_text"), (6, "gpt_oss")])
def test_more_ranks_change_nothing(model_pool: WorkerPool, ranks: int, name: str) -> None:
    """More than there are key heads, or documents, or windows' worth of tokens."""
    check(model_pool.run(errors, ranks, [name]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
def test_every_model_on_every_number_of_ranks(model_pool: WorkerPool, ranks: int) -> None:
    check(model_pool.run(errors, ranks, [*SHOWN], seconds=300))
