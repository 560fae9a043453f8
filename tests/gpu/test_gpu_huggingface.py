"""Need 27 over NCCL: models of transformers train on several ranks as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.gpu_case import SECONDS
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

RATE = 0.1


def train(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """The largest relative errors of losses and parameters after a few steps."""
    from mesh_attention.huggingface import ModelContextParallel
    from support.tiny_models import ALL, make_model, on_one_process

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = make_model(name, head_dim=16).cuda()
        return model, torch.optim.SGD(model.parameters(), RATE)

    group = dist.new_group(backend="nccl")
    alone, optimizer = made()
    wanted = []
    for batch in ALL:
        optimizer.zero_grad()
        loss, _ = on_one_process(alone, batch, "cuda")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        wanted.append(loss.item())
    model, optimizer = made()
    worst = 0.0
    with ModelContextParallel(model, group) as cp:
        for batch, true in zip(ALL, wanted, strict=True):
            optimizer.zero_grad()
            part = cp.shard_batch(**batch.whole).to("cuda")
            logits = model(**part.model_inputs()).logits
            mean = cp.cross_entropy(logits, part.labels, reduce="sum")
            mean.loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            worst = max(worst, abs(mean.value.item() - true) / true)
        cp.check()
    both = zip(model.parameters(), alone.parameters(), strict=True)
    return worst, max(((a - b).abs().max() / b.abs().max()).item() for a, b in both)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text"])
def test_models_train_over_nccl_as_on_one_process(
    gpu_pool_in_turns: WorkerPool, name: str, ranks: int
) -> None:
    """Windows that alternate and softcap, padding on both sides and packed documents."""
    for of_losses, of_parameters in gpu_pool_in_turns.run(train, ranks, name, seconds=3 * SECONDS):
        assert of_losses < 1e-4
        assert of_parameters < 1e-4


def train_sharded(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[Any], float]:
    """What the Trainer with FSDP2 logs and that of one process, and the worst of the parameters."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
    from torch.distributed.fsdp import FSDPModule

    from support.tiny_trainer import RUNS, launched
    from support.tiny_trainer import train as trained

    run = RUNS["on GPUs"]
    with launched(0, 0):
        wanted, parameters = trained(run.trainer(folder, None))
    # The group is the Trainer's default one, and has CPU tensors too.
    store = PrefixStore("trainer", _get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=rank, world_size=world_size)
    with launched(rank, world_size):
        trainer = run.trainer(folder, 2, world_size // 2, use_cpu=False)
        logged, of_ranks = trained(trainer)
        assert isinstance(trainer.model, FSDPModule)
        trainer.close()
    both = [(of_ranks[name].cpu(), p) for name, p in parameters.items()]
    return logged, wanted, max(((a - b).abs().max() / b.abs().max()).item() for a, b in both)


def test_a_sharded_trainer_trains_over_nccl_as_on_one_process(
    gpu_pool_in_turns: WorkerPool, tmp_path: Path
) -> None:
    """Two data-parallel by two context-parallel ranks, five steps."""
    answers = gpu_pool_in_turns.run(train_sharded, 4, str(tmp_path), seconds=3 * SECONDS)
    for logged, wanted, worst in answers:
        assert logged == [pytest.approx(x, rel=1e-4) for x in wanted]
        assert worst < 1e-4
