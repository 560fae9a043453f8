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


def compare(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """The largest relative error of each kind, on this rank."""
    from support.tiny_models import ALL, ModelContextParallel, error, make_model, on_one_process, on_ranks

    worst: dict[str, float] = {}
    for name in names:
        model = make_model(name)
        wanted = []
        for batch in ALL:
            model.zero_grad()
            loss, logits = on_one_process(model, batch)
            loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters()}
            wanted.append((loss.detach(), logits.detach(), grads))
        with ModelContextParallel(model) as cp:
            for number, batch in enumerate(ALL):
                model.zero_grad()
                mean, logits = on_ranks(cp, model, batch)
                mean.loss.backward()
                true_loss, true_logits, true_grads = wanted[number]
                errors = {"loss": error(mean.value, true_loss)}
                real = batch.real
                errors["logits"] = error(logits[real], true_logits[real])
                for n, p in model.named_parameters():
                    dist.all_reduce(p.grad)
                    errors[n] = error(p.grad, true_grads[n])
                for n, e in errors.items():
                    key = f"{name}, batch {number}: {n}"
                    worst[key] = e
    return worst


def check(found: list[dict[str, float]]) -> None:
    for of_rank in found:
        assert of_rank
        for what, e in of_rank.items():
            assert e < EXACT, f"{what}: {e}"


def test_every_model_has_losses_logits_and_gradients_of_one_process(model_pool: WorkerPool) -> None:
    check(model_pool.run(compare, 2, [*SHOWN]))
