"""An `Accelerator` that counts data-parallel ranks alone.

Trainers gather what ranks have of a batch, count it and divide by the number of processes. Ranks of
a context-parallel group have the same batch, so they are one process to such code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class DataParallelView(Accelerator):
    """What is gathered comes from data-parallel ranks. The number of processes is theirs only while
    a batch is worked on: FSDP saves by the number and the index of all."""

    dp: DeviceMesh
    cp_size: int
    _is_on_batch: bool

    @staticmethod
    def of(accelerator: Any, dp: DeviceMesh, cp_size: int) -> None:
        """Changes the object: Trainers and callbacks hold it already."""
        accelerator.__class__ = DataParallelView
        accelerator.dp, accelerator.cp_size, accelerator._is_on_batch = dp, cp_size, False

    @contextmanager
    def on_batch(self) -> Iterator[None]:
        self._is_on_batch = True
        try:
            yield
        finally:
            self._is_on_batch = False

    @property
    def num_processes(self) -> Any:
        return self.dp.size() if self._is_on_batch else super().num_processes

    @property
    def process_index(self) -> Any:
        return self.dp.get_local_rank() if self._is_on_batch else super().process_index

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(self._gather, tensor, error_on_other_type=True)

    def _gather(self, x: Tensor) -> Tensor:
        if self.dp.size() == 1:
            return x
        x = (x[None] if x.ndim == 0 else x).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.dp.size())]
        dist.all_gather(parts, x, group=self.dp.get_group())
        return torch.cat(parts)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        of_all = super().reduce(tensor, reduction, scale)
        if reduction != "sum":
            return of_all
        return recursively_apply(lambda x: x / self.cp_size, of_all)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """Lists, one after another."""
        lists: list[Any] = [None] * self.dp.size()
        dist.all_gather_object(lists, objects, group=self.dp.get_group())
        return [x for part in lists for x in part]
