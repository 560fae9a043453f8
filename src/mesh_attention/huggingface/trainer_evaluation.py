"""Evaluation by a Trainer on ranks: each sample counts once, logits are put together again, and
what is logged is that of as many processes as there are data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers.trainer
from torch import Tensor, nn
from transformers import Trainer

from mesh_attention.huggingface.repeated_samples import (
    count_samples,
    note_remainder,
    without_repeated,
)
from mesh_attention.huggingface.trainer_model import is_sharded, reshard

_Base: Any = Trainer if TYPE_CHECKING else object


class EvaluationOnRanks(_Base):
    """The part of `ContextParallelMixin` that evaluates."""

    model: Any
    optimizer: Any
    is_fsdp_enabled: bool
    _num_evaluated = 0  # batches of this rank

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of a whole batch; logits are whole and in order on all ranks of the group."""
        self._num_evaluated += 1
        if self._is_whole:
            with self.accelerator.on_batch():
                step: Any = super().prediction_step
                return step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        loader = self.accelerator.gradient_state.active_dataloader
        note_remainder(loader, self.mesh["dp"], inputs)
        whole = without_repeated(loader, self.mesh["dp"], inputs)
        part = self._prepare_inputs(self._shard(whole))
        labels, loss = whole.get("labels"), None
        with torch.no_grad(), self.compute_loss_context_manager():
            if labels is None:
                outputs = model(**part.model_inputs(), use_cache=False)
            else:
                count = self._num_targets([part], self.args.device)
                assert count is not None
                only_loss = prediction_loss_only
                result = self.compute_loss(
                    model, part, return_outputs=not only_loss, num_items_in_batch=count.clamp(min=1)
                )
                loss, outputs = (result, None) if only_loss else result
                # A batch without targets has no loss, and not one of 0: the Trainer leaves it out.
                loss = self._mean_of_ranks(loss).masked_fill(count == 0, torch.nan)
            if prediction_loss_only:
                return loss, None, None
            logits = self.cp.unshard(outputs.logits.contiguous(), 1, documents=part.documents)
        return loss, logits, None if labels is None else labels.to(self.args.device)

    def evaluation_loop(self, dataloader: Any, *args: Any, **more: Any) -> Any:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            self._shard_model()
        if not self._is_whole:
            count_samples(dataloader, self.mesh["dp"])
        self._num_evaluated = 0
        results = super().evaluation_loop(dataloader, *args, **more)
        reshard(self.model)
        return results

    def _shard_model(self) -> None:
        """Before any training; accelerate shards a model with its optimizer alone."""
        self.create_optimizer()
        self.model, _ = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped, self.optimizer = self.model, None

    def evaluate(self, *args: Any, **more: Any) -> Any:
        with patch.object(transformers.trainer, "speed_metrics", self._speed):
            return super().evaluate(*args, **more)

    def predict(self, *args: Any, **more: Any) -> Any:
        with patch.object(transformers.trainer, "speed_metrics", self._speed):
            return super().predict(*args, **more)

    def _speed(self, *args: Any, num_steps: Any = None, **more: Any) -> Any:
        """The Trainer takes all ranks for data-parallel ones where it counts its steps."""
        counted = None if num_steps is None else self._num_evaluated
        return transformers.trainer_utils.speed_metrics(*args, num_steps=counted, **more)
