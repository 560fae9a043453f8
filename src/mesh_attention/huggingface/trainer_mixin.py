"""Any `Trainer` of transformers on data-parallel by context-parallel ranks.

    class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer): ...

It differs in what depends on who has which tokens: ranks of a context-parallel group draw the same
batch and keep a part of it each, losses are means over all targets of all ranks, and evaluation
puts logits together again. DDP or FSDP2 average gradients over all ranks, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.head_loss import HeadLoss
from mesh_attention.huggingface.model import ModelContextParallel
from mesh_attention.huggingface.repeated_samples import (
    count_samples,
    note_remainder,
    without_repeated,
)
from mesh_attention.huggingface.trainer_arguments import (
    mesh_sizes,
    refuse_arguments,
    refuse_settings,
)
from mesh_attention.huggingface.trainer_batch import EmbeddingNoise, TrainerBatch, shifts_labels
from mesh_attention.huggingface.trainer_model import (
    is_compiled,
    keep_attention,
    refuse_unreduced,
    reshard,
    shard_on_cpu,
)
from mesh_attention.train.sharded_batch import ShardedBatch

_Base: Any = Trainer if TYPE_CHECKING else object


class ContextParallelMixin(_Base):
    """For a subclass of `Trainer`, named before it.

    cp_size     ranks that share a sequence, next to each other; None: all of them. The others are
                data-parallel, so batches are those of (all ranks / cp_size) processes
    cp_options  as of `ModelContextParallel`
    linear_loss losses are made in the model's head, without its logits, where the head is a plain
                matrix and nobody asks for logits. False: always from logits

    All else is as of the other class; start it with torchrun. `trainer.cp` is the
    `ModelContextParallel`, and `close()` gives the model its own attention back.
    """

    model: Any
    optimizer: Any
    is_fsdp_enabled: bool
    neftune_noise_alpha: float | None
    loss_is_scaled_for_ga = True  # `compute_loss` divides by all targets of a step

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
        super().__init__(*positional, **named)
        refuse_settings(self)
        sizes = mesh_sizes(self, cp_size)
        self.cp_size = sizes[1]
        self.mesh = init_device_mesh(self.args.device.type, sizes, mesh_dim_names=("dp", "cp"))
        self._noise_alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        self._attach(self.model)
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.model_accepts_loss_kwargs = True  # versions without loss_is_scaled_for_ga ask this

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            self.is_fsdp_enabled = shard_on_cpu(self.accelerator, self.args)

    def _attach(self, model: nn.Module) -> None:
        self.cp = ModelContextParallel(model, self.mesh["cp"], **self._cp_options)
        inside: Any = self.cp.model
        self._head_loss = HeadLoss.of(inside) if self._linear_loss else None
        self._noise = None
        if self._noise_alpha is not None:
            embeddings, rank = inside.get_input_embeddings(), self.mesh["cp"].get_local_rank()
            self._noise = EmbeddingNoise(embeddings, self._noise_alpha, rank)
        self._ready: nn.Module | None = None  # the wrapped model that was last seen to

    def call_model_init(self, *args: Any, **more: Any) -> Any:
        """Each training begins with another model, so with another object for it."""
        model = super().call_model_init(*args, **more)
        if hasattr(self, "cp"):
            self.close()
            self._attach(model)
        return model

    def close(self) -> None:
        for part in (self._head_loss, self._noise):
            if part is not None:
                part.remove()
        self._head_loss = self._noise = None
        self.cp.close()

    def get_cp_size(self) -> int:
        return self.cp_size

    # Batches: the same on all ranks of a context-parallel group, then a part on each.

    def _prepare_data_loader(self, loader: DataLoader[Any], *_: Any, **__: Any) -> Any:
        """As accelerate's, for data-parallel ranks alone. Batches stay on the CPU, where documents
        are read from them."""
        accelerator = self.accelerator
        if not getattr(loader, "_is_accelerate_prepared", False):
            loader = prepare_data_loader(
                loader,
                num_processes=self.mesh["dp"].size(),
                process_index=self.mesh["dp"].get_local_rank(),
                split_batches=accelerator.split_batches,
                put_on_device=False,
                rng_types=accelerator.rng_types.copy(),
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        if not any(loader is known for known in accelerator._dataloaders):
            accelerator._dataloaders.append(loader)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, sharded, and the number of their targets on all ranks."""
        wholes = (next(epoch_iterator, None) for _ in range(num_batches))
        parts = [self._shard(whole) for whole in wholes if whole is not None]
        return parts, self._get_num_items_in_batch(parts, device)

    def _shard(self, whole: Any) -> TrainerBatch:
        if not isinstance(whole, Mapping):
            raise MeshAttentionError(
                f"a batch is a {type(whole).__name__}; data_collator must give tensors by name"
            )
        arguments = {name: x for name, x in whole.items() if name not in _OF_FLASH_ATTENTION}
        if "cu_seq_lens_q" in whole:
            arguments["cu_seqlens"] = whole["cu_seq_lens_q"]
        shift = shifts_labels(self.cp.model)
        return TrainerBatch.of(self.cp.shard_batch(**arguments, shift_labels=shift), whole)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        counts = [part.num_targets for part in batch_samples]
        if not counts or any(count is None for count in counts):
            if counts:
                raise MeshAttentionError("batches have no labels; data_collator must give them")
            return None
        total = torch.stack(counts).sum().to(device)
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return total.clamp(min=1)

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, ShardedBatch):
            return data.to(self.args.device)
        return super()._prepare_input(data)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Of whole batches, each counted once."""
        wanted = self.args.include_num_input_tokens_seen
        if wanted == "no":
            return
        if wanted == "non_padding":
            count = (~inputs.padding).sum()
        else:  # rows that are one pack have the tokens of all rows
            whole = inputs.documents.num_tokens * len(inputs.position_ids)
            is_first = self.mesh["cp"].get_local_rank() == 0
            count = torch.tensor(whole if is_first else 0, device=self.args.device)
        self.state.num_input_tokens_seen += self.accelerator.gather(count).sum().item()

    # Losses and gradients.

    def train(self, *args: Any, **more: Any) -> Any:
        """Accelerate takes a model that was evaluated before for one that is wrapped already."""
        if self.model_wrapped is self.model:
            self.model._is_accelerate_prepared = False
        if isinstance(self.model, FSDPModule):  # and would put checkpoints into checkpoints
            self.accelerator.state.fsdp_plugin.activation_checkpointing = False
        return super().train(*args, **more)

    def training_step(self, model: nn.Module, *args: Any, **more: Any) -> Any:
        if model is not self._ready:
            refuse_unreduced(model)
            if not is_compiled(model):  # compiled checkpoints keep attention by themselves
                keep_attention(model, self.cp.keep_attention())
            self._ready = model
        loss: Tensor = super().training_step(model, *args, **more)
        return self._mean_of_ranks(loss)  # the Trainer adds them up to what people read

    def _mean_of_ranks(self, loss: Tensor) -> Tensor:
        """Of shares as `compute_loss` gives them, so the loss of all targets."""
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
        """From a sharded batch. The loss is this rank's share, times the number of ranks: DDP and
        FSDP2 take the mean of them, and so does what is logged."""
        arguments = inputs.model_inputs() | {"use_cache": False}
        if self._noise is not None:
            self._noise.length = inputs.whole["input_ids"].shape[1]
        if self.compute_loss_func is not None:
            outputs = model(**arguments)
            loss = self._loss_of_whole(outputs, inputs, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        options: dict[str, Any] = {
            "reduce": "fsdp" if self.is_fsdp_enabled else "ddp",
            "data_parallel": self.mesh["dp"],
            "num_targets": num_items_in_batch,
            "label_smoothing": self.args.label_smoothing_factor,
        }
        if self._head_loss is not None and not return_outputs:

            def in_head(hidden: Tensor, weight: Tensor, **more: Any) -> Any:
                more |= options
                return self.cp.linear_cross_entropy(hidden, weight, inputs.labels, **more)

            mean = self._head_loss.mean(model, arguments, in_head)
            if mean is not None:
                return mean.loss
            self._head_loss.remove()
            self._head_loss = None
        outputs = model(**arguments)
        mean = self.cp.cross_entropy(outputs.logits, inputs.labels, **options)
        return (mean.loss, outputs) if return_outputs else mean.loss

    def _loss_of_whole(self, outputs: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """`compute_loss_func` gets logits and labels of whole sequences, as on one process, on all
        ranks of a group: a mean over data-parallel ranks is left to take."""
        logits = outputs.logits.contiguous()
        whole = self.cp.unshard(logits, 1, documents=inputs.documents, grad="sum")
        labels = inputs.whole["labels"].to(whole.device)
        loss: Tensor = self.compute_loss_func(
            type(outputs)(**{**outputs, "logits": whole}),
            labels,
            num_items_in_batch=num_items_in_batch,
        )
        return loss * self.mesh["dp"].size()

    # Evaluation.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of a whole batch; logits are whole and in order on all ranks of the group."""
        loader = self.accelerator.gradient_state.active_dataloader
        note_remainder(loader, self.mesh["dp"], inputs)
        whole = without_repeated(loader, self.mesh["dp"], inputs)
        part = self._prepare_inputs(self._shard(whole))
        labels, loss = whole.get("labels"), None
        with torch.no_grad(), self.compute_loss_context_manager():
            if labels is None:
                outputs = model(**part.model_inputs(), use_cache=False)
            else:
                count = self._get_num_items_in_batch([part], self.args.device)
                only_loss = prediction_loss_only
                result = self.compute_loss(
                    model, part, return_outputs=not only_loss, num_items_in_batch=count
                )
                loss, outputs = (result, None) if only_loss else result
                loss = self._mean_of_ranks(loss)
            if prediction_loss_only:
                return loss, None, None
            logits = self.cp.unshard(outputs.logits.contiguous(), 1, documents=part.documents)
        return loss, logits, None if labels is None else labels.to(self.args.device)

    def evaluation_loop(self, dataloader: Any, *args: Any, **more: Any) -> Any:
        if self.is_fsdp_enabled and not isinstance(self.model, FSDPModule):
            self._shard_model()
        count_samples(dataloader, self.mesh["dp"])
        self.gather_function = self._gather
        results = super().evaluation_loop(dataloader, *args, **more)
        reshard(self.model)
        return results

    def _shard_model(self) -> None:
        """Before any training; accelerate shards a model with its optimizer alone."""
        self.create_optimizer()
        self.model, _ = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped, self.optimizer = self.model, None

    def _gather(self, x: Tensor) -> Tensor:
        """From one rank of each context-parallel group, without what the last batch repeats."""
        of_all: Tensor = self.accelerator.gather(x).unflatten(0, (dist.get_world_size(), -1))
        values = of_all[:: self.cp_size].flatten(0, 1)
        loader = self.accelerator.gradient_state
        ends = loader.end_of_dataloader and loader.remainder > 0
        return values[: loader.remainder] if ends else values


_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
