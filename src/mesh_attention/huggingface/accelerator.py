"""Data-parallel by context-parallel ranks of accelerate's `Accelerator`, with DDP or FSDP2.

    cp = AcceleratorContextParallel(accelerator, model, cp_size=4)  # before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = cp.loss(model, batch)  # in place of model(**batch).loss
        accelerator.backward(loss)

Ranks that share a sequence get the same batch. The functions below see to that, for this class and
for the Trainer.
"""

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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.head_loss import ModelLoss
from mesh_attention.huggingface.model import ModelContextParallel
from mesh_attention.huggingface.trainer_model import refuse_unreduced


class AcceleratorContextParallel(ModelContextParallel):
    """A `ModelContextParallel` whose ranks and batches are those of an `Accelerator`.

    accelerator  with DDP or FSDP2; not with a `parallelism_config`. Loaders that it prepares from
                 now on deal batches to data-parallel ranks: those of a sequence get the same one,
                 whole and on the CPU
    model        before `accelerator.prepare`
    cp_size      ranks that share a sequence, next to each other; None: all of them
    options      as of `ModelContextParallel`

    `mesh` has the dimensions dp and cp. All else a loop may want is there too: `shard_batch`,
    `cross_entropy` with `data_parallel=cp.mesh["dp"]`, `unshard` for metrics.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        *,
        cp_size: int | None = None,
        **options: Any,
    ) -> None:
        refuse_accelerator(accelerator)
        self.mesh, self._accelerator = mesh_of_ranks(accelerator, cp_size), accelerator
        self._reduced: nn.Module | None = None
        super().__init__(model, self.mesh["cp"], **options)
        self._model_loss = ModelLoss(self)
        deal_to_replicas(accelerator, self.mesh)

    def close(self) -> None:
        if hasattr(self, "_model_loss"):
            self._model_loss.remove()
        super().close()

    def loss(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        *,
        num_targets: int | Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss of a whole batch, to call `accelerator.backward` on: the mean over all targets
        of all ranks, the same number on each. No logits are made if the head is a plain matrix.

        Accelerate divides it by `gradient_accumulation_steps`, as for one process: the mean of the
        means of batches. With `num_targets`, the number of targets in all batches of a step on all
        ranks, it is the mean over these. `options`: of `cross_entropy`, such as label_smoothing.
        """
        if model is not self._reduced:
            refuse_unreduced(model)
            self._reduced = model
        if batch.get("labels") is None:
            raise MeshAttentionError("the batch has no labels, so it has no loss")
        part = self.shard_batch(**batch).to(self._accelerator.device)
        mean, _ = self._model_loss.mean(
            model,
            part.model_inputs() | {"use_cache": False},
            part.labels,
            reduce="fsdp" if self._accelerator.is_fsdp2 else "ddp",
            data_parallel=self.mesh["dp"],
            num_targets=num_targets,
            **options,
        )
        # The gradient of this rank's share, and the number that people read.
        loss = mean.loss + (mean.value.to(mean.loss.dtype) - mean.loss).detach()
        return loss if num_targets is None else loss * self._accelerator.gradient_accumulation_steps


def mesh_of_ranks(accelerator: Accelerator, cp_size: Any) -> DeviceMesh:
    """A mesh with the dimensions dp and cp. `cp_size` None: all ranks share a sequence."""
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
    """Refuses settings of an Accelerator, given to it or by `accelerate launch`."""
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
    """`refused`: by name of a setting, whether it is on, and why it must not be."""
    for name, (is_asked, why) in refused.items():
        if is_asked:
            raise MeshAttentionError(f"{name} is not supported with context parallelism: {why}")


def deal_to_replicas(
    accelerator: Accelerator, mesh: DeviceMesh, *, on_device: bool = False
) -> None:
    """Replaces `prepare_data_loader` of this accelerator, which `prepare` calls too: loaders that
    it makes from now on give ranks of a sequence the same batch. Accelerate itself counts all
    processes, and its `ParallelismConfig` knows no other context parallelism than its own. Batches
    stay on the CPU, where documents are read from them, unless `on_device`."""
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
    """An Accelerator that gathers and reduces over data-parallel ranks, since ranks of a
    context-parallel group have the same batch. `num_processes` and `process_index` count
    data-parallel ranks only inside `on_batch`: FSDP saves by the number and the index of all."""

    dp: DeviceMesh
    cp_size: int
    _is_on_batch: bool

    @staticmethod
    def of(accelerator: Any, dp: DeviceMesh, cp_size: int) -> None:
        """Changes the class of the object itself: Trainers and callbacks hold it already."""
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
        """The lists of all data-parallel ranks, joined."""
        lists: list[Any] = [None] * self.dp.size()
        dist.all_gather_object(lists, objects, group=self.dp.get_group())
        return [x for part in lists for x in part]


# The oldest and the newest tested versions of packages on whose inner parts this code relies.
TESTED = {"accelerate": ((1, 13), (1, 15)), "trl": ((1, 15), (1, 16))}


def check_version(package: str) -> None:
    """Refuses older versions of a package than tested, and warns once of newer ones."""
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
