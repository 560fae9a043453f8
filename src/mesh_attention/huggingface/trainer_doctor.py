"""`trainer.doctor()`: a batch of a Trainer by its `compute_loss`, on ranks and on one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mesh_attention.diagnose.doctor import doctor
from mesh_attention.diagnose.report import Diagnosis
from mesh_attention.diagnose.runs import inner
from mesh_attention.errors import MeshAttentionError


def doctor_of(trainer: Any, whole: Mapping[str, Any] | None, options: dict[str, Any]) -> Diagnosis:
    if trainer._is_whole:
        raise MeshAttentionError(
            f"trainer.doctor() compares the loss of ContextParallelTrainer, and "
            f"{type(trainer).__name__} has its own: call mesh_attention.doctor with a step of yours"
        )
    if whole is None:
        with torch.random.fork_rng(devices=[]):
            whole = next(iter(trainer.get_train_dataloader()))
    model: nn.Module = trainer.model_wrapped
    is_wrapped = inner(model) is not model or isinstance(model, FSDPModule)

    def step(model: Any, whole: Any) -> Tensor:
        part = trainer._prepare_inputs(trainer._shard(whole))
        count = trainer._get_num_items_in_batch([part], trainer.args.device)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, part, num_items_in_batch=count)
        return loss

    def plain(model: Any, whole: Any) -> Tensor:
        part = trainer._prepare_inputs(trainer._shard(whole))
        smoothing = trainer.args.label_smoothing_factor
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.cp.plain_loss(model, part, whole, label_smoothing=smoothing)
        return loss

    how = {"plain": plain, "reduce_gradients": None if is_wrapped else _average, **options}
    return doctor(step, whole, model, trainer.cp, **how)


def _average(model: nn.Module) -> None:
    """As DDP will, when training begins."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
