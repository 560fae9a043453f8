"""The ranks of an `Accelerator` as data-parallel by context-parallel ones: batches are dealt to the
first alone, and gathered from them. For the Trainer, and for loops with an Accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging

from mesh_attention.errors import MeshAttentionError


def mesh_of_ranks(accelerator: Accelerator, cp_size: Any) -> DeviceMesh:
    """With the dimensions dp and cp; `cp_size` None: all ranks share a sequence."""
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    if accelerator.num_processes != world_size:  # DDP would not be where ranks are
        raise MeshAttentionError(
            f"the default process group has {world_size} processes, and accelerate sees "
            f"{accelerator.num_processes}: start them with torchrun, and do not create the group "
            "yourself; without a GPU also give TrainingArguments(use_cpu=True)"
        )
    if cp_size is not None and type(cp_size) is not int:
        raise MeshAttentionError(f"cp_size={cp_size!r}: must be a whole number, or None")
    size = world_size if cp_size is None else cp_size
    if size < 1 or world_size % size:
        raise MeshAttentionError(f"cp_size={cp_size} does not divide {world_size} processes")
    if size < world_size and not accelerator.even_batches:
        raise MeshAttentionError(
            "accelerator_config.even_batches=False is not supported with several sequences at "
            "once: a rank with fewer batches would be waited for"
        )
    sizes = world_size // size, size
    return init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp", "cp"))


def refuse_accelerator(accelerator: Accelerator) -> None:
    """What it was told, or `accelerate launch` in the environment."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    refused = {
        "DeepSpeed": (
            accelerator.distributed_type == DistributedType.DEEPSPEED,
            "it reduces gradients in its own way; take FSDP2",
        ),
        "FSDP1": (
            plugin is not None and plugin.fsdp_version != 2,
            "take FSDP2, fsdp_config={'version': 2}",
        ),
        "parallelism_config": (
            getattr(accelerator, "parallelism_config", None) is not None,
            "accelerate's own; leave it out, cp_size says all",
        ),
        "dispatch_batches": (bool(accelerator.dispatch_batches), "every rank reads its batches"),
    }
    refuse(refused)


def refuse(refused: Mapping[str, tuple[Any, str]]) -> None:
    """By name: whether it is asked for, and why that cannot be."""
    for name, (is_asked, why) in refused.items():
        if is_asked:
            raise MeshAttentionError(f"{name} is not supported with context parallelism: {why}")


def deal_to_replicas(
    accelerator: Accelerator, mesh: DeviceMesh, *, on_device: bool = False
) -> None:
    """`accelerator.prepare` and `prepare_data_loader` then make loaders that give ranks of a
    sequence the same batch. Of this object alone: accelerate itself counts all processes, and its
    `ParallelismConfig` knows no other context parallelism than its own. Batches stay on the CPU,
    where documents are read from them, unless `on_device`.

    The place that is patched: `prepare_data_loader` of the object. It does what accelerate's does,
    with the function of that name in `accelerate.data_loader`."""
    check_version("accelerate")

    def prepare(loader: Any, *_: Any, **__: Any) -> Any:
        if not getattr(loader, "_is_accelerate_prepared", False):
            loader = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=mesh["dp"].size(),
                process_index=mesh["dp"].get_local_rank(),
                split_batches=accelerator.split_batches,
                put_on_device=on_device,
                rng_types=accelerator.rng_types.copy(),
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
        if not any(loader is known for known in accelerator._dataloaders):
            accelerator._dataloaders.append(loader)
        return loader

    accelerator.prepare_data_loader = prepare


class DataParallelView(Accelerator):
    """What is gathered comes from data-parallel ranks: those of a context-parallel group have the
    same batch. The number of processes is theirs only while a batch is worked on: FSDP saves by the
    number and the index of all."""

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


# Versions of packages whose inner parts are relied on, the oldest and the newest.
TESTED = {"accelerate": ((1, 13), (1, 15)), "trl": ((1, 15), (1, 16))}


def check_version(package: str) -> None:
    """Older ones lack what is needed, and are refused. Newer ones may have changed it: one line of
    warning."""
    oldest, newest = TESTED[package]
    installed = version(package)
    number = tuple(int(x) for x in installed.split(".")[:2])
    tested = "tested are {}.{} to {}.{}".format(*oldest, *newest)
    tested += f": pip install '{package}>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}'"
    if number < oldest:
        raise MeshAttentionError(f"{package} {installed} is too old; {tested}")
    if number > newest:
        logging.get_logger(__name__).warning_once(
            f"{package} {installed} is new here, and inner parts of it are relied on; {tested}, or "
            "compare with one process (mesh_attention.doctor)"
        )
