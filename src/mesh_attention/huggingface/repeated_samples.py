"""Samples that accelerate repeats to fill the last batch of data-parallel ranks.

Evaluation must count none twice. How many of the last batch are new follows from the length of a
set; of one that is read as a stream from the number of samples that came, which every rank sees,
since each reads the whole stream and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from mesh_attention.errors import MeshAttentionError
from mesh_attention.sharded_batch import IGNORE_INDEX


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # set_epoch, generator


def count_samples(loader: Any) -> None:
    """Of a prepared loader, where it reads a stream in this process: workers do not tell."""
    shard = getattr(loader, "dataset", None)
    if isinstance(shard, IterableDatasetShard) and loader.num_workers == 0:
        shard.dataset = CountedStream(shard.dataset)


def note_remainder(loader: Any) -> None:
    """At the end of a stream: how many samples of the last batch are new, where accelerate looks
    for it."""
    stream = getattr(getattr(loader, "dataset", None), "dataset", None)
    if isinstance(stream, CountedStream) and loader.end_of_dataloader:
        loader.remainder = stream.num_samples % _samples_of_step(loader)


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
        sample = torch.arange(each)[:, None]
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
