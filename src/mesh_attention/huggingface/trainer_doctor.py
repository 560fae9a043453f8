"""`trainer.doctor()`: a batch of a Trainer by its `compute_loss`, on ranks and on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mesh_attention.diagnose.doctor import doctor
from mesh_attention.diagnose.report import Diagnosis
from mesh_attention.diagnose.runs import inner


def doctor_of(trainer: Any, whole: Any, options: dict[str, Any]) -> Diagnosis:
    """`doctor` on the batch `whole` (None: the first of training), with these `options` of it."""
    model: nn.Module = trainer.model_wrapped
    is_wrapped = inner(model) is not model or isinstance(model, FSDPModule)

    def step(model: Any, whole: Any) -> Any:
        """On ranks, by `compute_loss`."""
        with trainer.compute_loss_context_manager(), trainer._on_batch():
            if trainer._is_whole:
                made = trainer._generates_whole  # and so prepared
                inputs = {**whole} if made else trainer._prepare_inputs({**whole})
                return trainer.compute_loss(model, inputs)
            part = trainer._prepare_inputs(trainer._shard(whole))
            count = trainer._get_num_items_in_batch([part], trainer.args.device)
            return trainer.compute_loss(model, part, num_items_in_batch=count)

    def plain(model: Any, whole: Any) -> Any:
        """On one process, by the model's own attention."""
        if trainer._is_whole:
            with ExitStack() as blocks:
                for other in trainer._whole_models:
                    blocks.enter_context(other.cp.own_attention())
                return step(model, whole)
        part = trainer._prepare_inputs(trainer._shard(whole))
        how = {"router": trainer._router_weight()}
        how["label_smoothing"] = trainer.args.label_smoothing_factor
        with trainer.compute_loss_context_manager():
            return trainer.cp.plain_loss(model, part, whole, **how)

    how = {"plain": plain, "reduce_gradients": None if is_wrapped else _average, **options}
    with _logs_as_before(trainer):
        if whole is None:
            with torch.random.fork_rng(devices=[]):
                whole = next(iter(trainer.get_train_dataloader()))
        if trainer._generates_whole and not isinstance(whole, Mapping):
            whole = _generated(trainer, whole)
        return doctor(step, whole, model, trainer.cp, **how)


def _generated(trainer: Any, prompts: Any) -> dict[str, Any]:
    """A batch of scored completions of the first prompts, with `input_ids` and `attention_mask`,
    in which `doctor` looks for tokens."""
    cuda = [trainer.args.device.index] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), trainer._on_batch():
        batch = trainer._generate_and_score_completions(prompts)
    rows = trainer.args.per_device_train_batch_size
    batch = {n: x[:rows] if isinstance(x, Tensor) and x.ndim else x for n, x in batch.items()}
    for name, part in ("input_ids", "ids"), ("attention_mask", "mask"):
        batch[name] = torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1)
    return batch


_OF_LOGS = ("_metrics", "_logs", "_total_train_tokens", "_pending_metrics", "_pending_extra_logs")


@contextmanager
def _logs_as_before(trainer: Any) -> Iterator[None]:
    """Restores logs: losses of TRL note what is logged with the next step. They also ask for the
    number of batches in a step, which is 1 here."""
    before = {name: deepcopy(x) for name, x in vars(trainer).items() if name in _OF_LOGS}
    num_tokens = trainer.state.num_input_tokens_seen
    try:
        with patch.object(trainer, "current_gradient_accumulation_steps", 1, create=True):
            yield
    finally:
        vars(trainer).update(before)
        trainer.state.num_input_tokens_seen = num_tokens


def _average(model: nn.Module) -> None:
    """As DDP will, when training begins."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
