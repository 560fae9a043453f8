"""How many samples of the last batch are new: accelerate repeats some to fill the batch of every
data-parallel rank, and without that the batch is shorter than others.

Evaluation must count each sample once. Of a set the number follows from its length; of one that is
read as a stream from the number of samples that came, whatever length it says. Every rank sees
them, since each reads the whole stream and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from mesh_attention.errors import MeshAttentionError
from mesh_attention.train.sharded_batch import IGNORE_INDEX


class CountedStream(IterableDataset[Any]):
    """A stream that knows how many samples came from it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.num_samples = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_samples = 0
        for sample in self._stream:
            self.num_samples += 1
            yield sample

    def __len__(self) -> int:
        return len(self._stream)  # a TypeError, as of any stream, where it has none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # set_epoch, generator


def count_samples(loader: Any, dp: DeviceMesh) -> None:
    """Of a prepared loader, where it reads a stream in this process: workers do not tell."""
    dataset = getattr(loader, "dataset", None)
    base = getattr(loader, "base_dataloader", None)
    if base is None or not isinstance(dataset, IterableDataset) or loader.num_workers > 0:
        return
    if isinstance(dataset, IterableDatasetShard):
        if not isinstance(dataset.dataset, CountedStream):
            dataset.dataset = CountedStream(dataset.dataset)
    elif dp.size() == 1 and not isinstance(dataset, CountedStream):
        # A DataLoader refuses another data set for its sampler's sake; streams have none.
        vars(base)["dataset"] = CountedStream(dataset)


def note_remainder(loader: Any, dp: DeviceMesh, whole: Any) -> None:
    """At the end of a stream: how many samples of the last batch are new, where accelerate looks
    for it."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset) or not loader.end_of_dataloader:
        return
    stream = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    if isinstance(stream, CountedStream):
        if not loader._drop_last:
            loader.remainder = stream.num_samples % _samples_of_step(loader)
    elif dp.size() == 1 and isinstance(whole, Mapping) and "input_ids" in whole:
        loader.remainder = len(whole["input_ids"])  # of a worker, whatever length the stream says


def without_repeated(loader: Any, dp: DeviceMesh, whole: Any) -> Any:
    """The batch, in which repeated samples have no targets. What they add to logits is cut off
    where those are gathered."""
    labels = whole.get("labels") if isinstance(whole, Mapping) else None
    remainder = getattr(loader, "remainder", -1)
    if dp.size() == 1 or labels is None or remainder < 1 or not loader.end_of_dataloader:
        return whole
    each = _samples_of_step(loader) // dp.size()
    positions = whole.get("position_ids")
    if len(labels) == each:
        sample = torch.arange(each, device=labels.device)[:, None]
    elif positions is not None and (positions == 0).sum() == each:  # one pack
        sample = (positions == 0).flatten().cumsum(0).view(positions.shape) - 1
    else:
        raise MeshAttentionError(
            f"the last batch for evaluation has {remainder} of {each * dp.size()} samples, and "
            "the rest is repeated, but data_collator does not give a row for each: give it a "
            f"number of samples that {each * dp.size()} divides"
        )
    repeated = sample >= remainder - dp.get_local_rank() * each
    return {**whole, "labels": labels.masked_fill(repeated.to(labels.device), IGNORE_INDEX)}


def _samples_of_step(loader: Any) -> int:
    """Of all data-parallel ranks."""
    shard = loader.dataset
    if not isinstance(shard, IterableDatasetShard):
        return int(loader.total_batch_size)
    return int(shard.batch_size * (1 if shard.split_batches else shard.num_processes))
