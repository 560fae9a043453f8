"""Evaluation by a Trainer on ranks: each sample counts once, logits are whole, and logs count only
data-parallel ranks as processes.

Accelerate repeats samples to fill the last batch of every data-parallel rank. How many samples of
that batch are new (its `remainder`) follows from the length of the data set; for a stream, from the
number of samples read, whatever length the stream says. Each rank reads the whole stream, so all
agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers.trainer
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset
from transformers import Trainer

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.trainer_model import is_sharded, reshard
from mesh_attention.train.sharded_batch import IGNORE_INDEX

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
        """Takes a whole batch; returns whole logits, in order, on all ranks of the group."""
        self._num_evaluated += 1
        if self._is_whole:
            with self.accelerator.on_batch():
                step: Any = super().prediction_step
                return step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        loader = self.accelerator.gradient_state.active_dataloader
        _note_remainder(loader, self.mesh["dp"], inputs)
        whole = _without_repeated(loader, self.mesh["dp"], inputs)
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
                # A batch without targets has no loss: the Trainer leaves NaN out, but not 0.
                loss = self._mean_of_ranks(loss).masked_fill(count == 0, torch.nan)
            if prediction_loss_only:
                return loss, None, None
            logits = self.cp.unshard(outputs.logits.contiguous(), 1, documents=part.documents)
        return loss, logits, None if labels is None else labels.to(self.args.device)

    def evaluation_loop(self, dataloader: Any, *args: Any, **more: Any) -> Any:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            self._shard_model()
        if not self._is_whole:
            _count_samples(dataloader, self.mesh["dp"])
        self._num_evaluated = 0
        results = super().evaluation_loop(dataloader, *args, **more)
        reshard(self.model)
        return results

    def _shard_model(self) -> None:
        """Before any training: accelerate shards a model only with its optimizer."""
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
        """Speed by the steps of this rank: the Trainer counts all ranks as data-parallel."""
        counted = None if num_steps is None else self._num_evaluated
        return transformers.trainer_utils.speed_metrics(*args, num_steps=counted, **more)


class _CountedStream(IterableDataset[Any]):
    """A stream that counts its samples."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_samples = 0
        for sample in self._stream:
            self.num_samples += 1
            yield sample

    def __len__(self) -> int:
        return len(self._stream)  # a TypeError if the stream has no length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # set_epoch, generator


def _count_samples(loader: Any, dp: DeviceMesh) -> None:
    """Makes the stream that a prepared loader reads a `_CountedStream`. Streams that workers read
    cannot be counted."""
    dataset = getattr(loader, "dataset", None)
    base = getattr(loader, "base_dataloader", None)
    if base is None or not isinstance(dataset, IterableDataset) or loader.num_workers > 0:
        return
    if isinstance(dataset, IterableDatasetShard):
        if not isinstance(dataset.dataset, _CountedStream):
            dataset.dataset = _CountedStream(dataset.dataset)
    elif dp.size() == 1 and not isinstance(dataset, _CountedStream):
        # Past the check of DataLoader, which refuses another data set because of its sampler.
        vars(base)["dataset"] = _CountedStream(dataset)


def _note_remainder(loader: Any, dp: DeviceMesh, whole: Any) -> None:
    """At the end of a stream, sets `remainder` of its loader, which accelerate reads too."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or not loader.end_of_dataloader:
        return
    stream = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    if isinstance(stream, _CountedStream):
        if not loader._drop_last:
            loader.remainder = stream.num_samples % _samples_of_step(loader)
    elif dp.size() == 1 and isinstance(whole, Mapping) and "input_ids" in whole:
        loader.remainder = len(whole["input_ids"])  # of a worker, whatever length the stream says


def _without_repeated(loader: Any, dp: DeviceMesh, whole: Any) -> Any:
    """The batch without targets of repeated samples. Accelerate cuts off their logits."""
    labels = whole.get("labels") if isinstance(whole, Mapping) else None
    remainder = getattr(loader, "remainder", -1)
    if dp.size() == 1 or labels is None or remainder < 1 or not loader.end_of_dataloader:
        return whole
    per_rank = _samples_of_step(loader) // dp.size()
    positions = whole.get("position_ids")
    if len(labels) == per_rank:
        sample = torch.arange(per_rank, device=labels.device)[:, None]
    elif positions is not None and (positions == 0).sum() == per_rank:  # one pack
        sample = (positions == 0).flatten().cumsum(0).view(positions.shape) - 1
    else:
        raise MeshAttentionError(
            f"the last batch for evaluation has {remainder} of {per_rank * dp.size()} samples, and "
            "the rest is repeated, but data_collator does not give a row for each: give it a "
            f"number of samples that {per_rank * dp.size()} divides"
        )
    repeated = sample >= remainder - dp.get_local_rank() * per_rank
    return {**whole, "labels": labels.masked_fill(repeated.to(labels.device), IGNORE_INDEX)}


def _samples_of_step(loader: Any) -> int:
    """The number of samples that all data-parallel ranks read in a step."""
    shard = loader.dataset
    if not isinstance(shard, IterableDatasetShard):
        return int(loader.total_batch_size)
    return int(shard.batch_size * (1 if shard.split_batches else shard.num_processes))
