"""Any `Trainer` of transformers on data-parallel by context-parallel ranks.

    class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer): ...

Ranks of a context-parallel group draw the same batch, and DDP or FSDP2 average gradients over all
ranks. For the rest there are two ways. With the `compute_loss` of `Trainer`, ranks cut batches, and
the loss is a mean over all targets of all ranks. A Trainer with a `compute_loss` of its own, as
TRL's, sees whole batches and whole outputs of the model (`whole_model.py`), as on one process for
each data-parallel rank (`_is_whole`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from mesh_attention.diagnose.report import Diagnosis
from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.accelerator import (
    DataParallelView,
    deal_to_replicas,
    mesh_of_ranks,
)
from mesh_attention.huggingface.head_loss import ModelLoss
from mesh_attention.huggingface.model import ModelContextParallel
from mesh_attention.huggingface.trainer_arguments import (
    refuse_arguments,
    refuse_order,
    refuse_settings,
    refuse_trainer,
    takes_whole_batches,
)
from mesh_attention.huggingface.trainer_doctor import doctor_of
from mesh_attention.huggingface.trainer_evaluation import EvaluationOnRanks
from mesh_attention.huggingface.trainer_model import (
    EmbeddingNoise,
    is_compiled,
    keep_attention,
    prepared_once,
    refuse_unreduced,
    router_weight,
    shard_on_cpu,
)
from mesh_attention.huggingface.whole_model import WholeModel
from mesh_attention.train.sharded_batch import ShardedBatch


class ContextParallelMixin(EvaluationOnRanks):
    """Makes a subclass of `Trainer`, which is named after it, train on ranks.

    cp_size     ranks that share a sequence, next to each other; None: all of them. The others are
                data-parallel, so batches are those of (all ranks / cp_size) processes
    cp_options  as of `ModelContextParallel`
    linear_loss losses are made in the model's head, without its logits, where the head is a plain
                matrix and nobody asks for logits. False: always from logits

    All else is as of the other class; start it with torchrun. `trainer.cp` is the
    `ModelContextParallel`, and `close()` gives the model its own attention back.

    A `compute_loss` of your own gets whole batches, and whole logits from the model, which every
    rank then holds. With `takes_sharded_batches = True` in the class it gets a `ShardedBatch`.
    """

    neftune_noise_alpha: float | None
    loss_is_scaled_for_ga: bool | None = True  # `compute_loss` divides by all targets of a step
    takes_sharded_batches = False
    _generates_whole = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        refuse_order(cls, ContextParallelMixin)

    def __init__(
        self,
        *positional: Any,
        cp_size: int | None = None,
        cp_options: Mapping[str, Any] | None = None,
        linear_loss: bool = True,
        **named: Any,
    ) -> None:
        # Not by its place: the order of arguments differs between Trainers.
        values = (*positional, *named.values())
        refuse_arguments(next((x for x in values if isinstance(x, TrainingArguments)), None))
        self._cp_options, self._linear_loss = dict(cp_options or {}), linear_loss
        self._is_whole = takes_whole_batches(type(self), ContextParallelMixin)
        if self._is_whole:
            untested = bool(self._cp_options.get("untested", False))
            refuse_trainer(type(self), generates=self._generates_whole, untested=untested)
            self.loss_is_scaled_for_ga = getattr(super(), "loss_is_scaled_for_ga", None)
        super().__init__(*positional, **named)
        refuse_settings(self)
        self.mesh = mesh_of_ranks(self.accelerator, cp_size)
        self.cp_size = self.mesh["cp"].size()
        self._noise_alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        self._attach(self.model)
        deal_to_replicas(self.accelerator, self.mesh, on_device=self._is_whole)
        DataParallelView.of(self.accelerator, self.mesh["dp"], self.cp_size)
        if not self._is_whole:
            self.model_accepts_loss_kwargs = True  # without loss_is_scaled_for_ga this is asked

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            self.is_fsdp_enabled = shard_on_cpu(self.accelerator, self.args)

    def _attach(self, model: nn.Module) -> None:
        """Makes the objects that change the model, until `close`."""
        self._whole_models: list[WholeModel] = []
        if self._is_whole:
            models = (model, getattr(self, "ref_model", None))  # the latter of TRL
            self._whole_models = [
                WholeModel.of(x, self.mesh["cp"], self._cp_options) for x in models if x is not None
            ]
            self.cp = self._whole_models[0].cp
        else:
            means = {"reduce": "ddp"} if router_weight(model) else {}  # of DDP, FSDP2 or nobody
            self.cp = ModelContextParallel(model, self.mesh["cp"], **means | self._cp_options)
        self._model_loss = ModelLoss(self.cp, in_head=self._linear_loss and not self._is_whole)
        self._noise = None
        if self._noise_alpha is not None:
            inside: Any = self.cp.model
            embeddings, rank = inside.get_input_embeddings(), self.mesh["cp"].get_local_rank()
            self._noise = EmbeddingNoise(embeddings, self._noise_alpha, rank)
            for whole in self._whole_models[:1]:
                whole.noise = self._noise
        self._ready: nn.Module | None = None  # the wrapped model that was last seen to

    def call_model_init(self, *args: Any, **more: Any) -> Any:
        """With `model_init` each training begins with another model, so with another object."""
        model = super().call_model_init(*args, **more)
        if hasattr(self, "cp"):
            self.close()
            self._attach(model)
        return model

    def close(self) -> None:
        for whole in self._whole_models:
            whole.close()
        self._model_loss.remove()
        if self._noise is not None:
            self._noise.remove()
        self._noise = None
        self.cp.close()

    def doctor(self, whole: Mapping[str, Any] | None = None, **options: Any) -> Diagnosis:
        """`mesh_attention.doctor` on a batch as data_collator makes it, or the first of training:
        `compute_loss` on ranks against the model's own attention on one process."""
        return doctor_of(self, whole, options)

    def get_cp_size(self) -> int:
        return self.cp_size

    # Batches: the same on all ranks of a context-parallel group, then a part on each.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, cut for this rank, and the number of their targets on all
        ranks."""
        batches = epoch_iterator if self._is_whole else map(self._shard, epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)  # type: ignore[no-any-return]

    def _shard(self, whole: Any) -> ShardedBatch:
        if not isinstance(whole, Mapping):
            raise MeshAttentionError(
                f"a batch is a {type(whole).__name__}; data_collator must give tensors by name"
            )
        return replace(self.cp.shard_batch(**whole), whole=whole)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self._is_whole:
            # Gathered from data-parallel ranks: nothing is left to divide by the ranks of a group.
            with patch.object(self, "get_cp_size", lambda: 1):
                return super()._get_num_items_in_batch(batch_samples, device)
        total = self._num_targets(batch_samples, device)
        return None if total is None else total.clamp(min=1)

    def _num_targets(self, parts: list[Any], device: torch.device) -> Tensor | None:
        """The targets of all ranks in these batches; None without batches."""
        counts = [part.num_targets for part in parts]
        if any(count is None for count in counts):
            raise MeshAttentionError("batches have no labels; data_collator must give them")
        own = torch.stack(counts).sum().to(device) if counts else None
        return None if own is None else self.accelerator.gather(own).sum()

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, ShardedBatch):
            return data.to(self.args.device)
        return super()._prepare_input(data)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(getattr(inputs, "whole", inputs))

    def floating_point_ops(self, inputs: Any) -> float:
        """The Trainer adds up those of all ranks, and ranks of a group have the same batch."""
        operations: float = super().floating_point_ops(getattr(inputs, "whole", inputs))
        return operations / self.cp_size

    # Losses and gradients.

    def train(self, *args: Any, **more: Any) -> Any:
        # Accelerate takes a model that was evaluated before for one that is wrapped already.
        if getattr(self.model_wrapped, "_orig_mod", self.model_wrapped) is self.model:
            self.model_wrapped, self.model._is_accelerate_prepared = self.model, False
        with prepared_once(self.accelerator, self.model):
            return super().train(*args, **more)

    def training_step(self, model: nn.Module, *args: Any, **more: Any) -> Any:
        if model is not self._ready:
            refuse_unreduced(model)
            if not is_compiled(model):  # compiled checkpoints keep attention by themselves
                keep_attention(model, self.cp.keep_attention())
            self._ready = model
        with self._on_batch():
            loss: Tensor = super().training_step(model, *args, **more)
        return self._mean_of_ranks(loss)  # the Trainer adds them up to what people read

    def _on_batch(self) -> AbstractContextManager[None]:
        return self.accelerator.on_batch() if self._is_whole else nullcontext()

    def _mean_of_ranks(self, loss: Tensor) -> Tensor:
        """The loss of all targets, from the shares that `compute_loss` returns on each rank."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a sharded batch: this rank's share, times the number of ranks, since DDP,
        FSDP2 and `_mean_of_ranks` take the mean of them."""
        if self._is_whole:  # asked by an override, for what it builds on
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        arguments = inputs.model_inputs() | {"use_cache": False}
        if self._noise is not None:
            self._noise.length = inputs.whole["input_ids"].shape[1]
        if self.compute_loss_func is not None:
            outputs = model(**arguments)
            loss = self._loss_of_whole(outputs, inputs, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        mean, outputs = self._model_loss.mean(
            model,
            arguments,
            inputs.labels,
            logits=return_outputs,
            reduce="fsdp" if self.is_fsdp_enabled else "ddp",
            data_parallel=self.mesh["dp"],
            num_targets=num_items_in_batch,
            label_smoothing=self.args.label_smoothing_factor,
        )
        loss, router = mean.loss, self._router_weight()
        if router:
            loss = loss + router * outputs.aux_loss
        return (loss, outputs) if return_outputs else loss

    def _router_weight(self) -> float:
        """The weight of the loss that balances experts, as in transformers: 0 with label smoothing;
        otherwise each batch of a step adds all of it."""
        if self.args.label_smoothing_factor:
            return 0.0
        return router_weight(self.cp.model) * (self.mesh["dp"].size() if self.model.training else 1)

    def _loss_of_whole(self, outputs: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """By `compute_loss_func`, which gets logits and labels of whole sequences on all ranks of a
        group. DDP and FSDP2 take a mean over all ranks, where it wants a sum over data-parallel
        ones."""
        logits = outputs.logits.contiguous()
        whole = self.cp.unshard(logits, 1, documents=inputs.documents, grad="sum")
        labels = inputs.whole["labels"].to(whole.device)
        loss: Tensor = self.compute_loss_func(
            type(outputs)(**{**outputs, "logits": whole}),
            labels,
            num_items_in_batch=num_items_in_batch,
        )
        return loss * self.mesh["dp"].size()


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    __doc__ = ContextParallelMixin.__doc__
