"""`trainer.doctor()`: a batch of a Trainer by its `compute_loss`, on ranks and on one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
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
    if trainer._generates_whole:
        raise MeshAttentionError(
            f"trainer.doctor(): {type(trainer).__name__} generates what it is trained on; call "
            "mesh_attention.doctor with a step of yours"
        )
    if whole is None:
        with torch.random.fork_rng(devices=[]):
            whole = next(iter(trainer.get_train_dataloader()))
    model: nn.Module = trainer.model_wrapped
    is_wrapped = inner(model) is not model or isinstance(model, FSDPModule)

    def whole_step(model: Any, whole: Any) -> Tensor:
        """Of a Trainer that makes losses of whole batches."""
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, trainer._prepare_inputs({**whole}))
        return loss

    def plain_step(model: Any, whole: Any) -> Tensor:
        with ExitStack() as held:
            for other in trainer._whole_models:
                held.enter_context(other.cp.own_attention())
            return whole_step(model, whole)

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
            loss: Tensor = trainer.cp.plain_loss(
                model, part, whole, router=trainer._router_weight(), label_smoothing=smoothing
            )
        return loss

    steps = (whole_step, plain_step) if trainer._is_whole else (step, plain)
    how = {"plain": steps[1], "reduce_gradients": None if is_wrapped else _average, **options}
    return doctor(steps[0], whole, model, trainer.cp, **how)


def _average(model: nn.Module) -> None:
    """As DDP will, when training begins."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
