"""Loops with accelerate's `Accelerator` on data-parallel by context-parallel ranks, with DDP or
FSDP2.

    cp = AcceleratorContextParallel(accelerator, model, cp_size=4)  # before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = cp.loss(model, batch)  # in place of model(**batch).loss
        accelerator.backward(loss)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.accelerator_ranks import (
    deal_to_replicas,
    mesh_of_ranks,
    refuse_accelerator,
)
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
        """Of a whole batch, to call `accelerator.backward` on: the mean over all targets of all
        ranks, so the same number on each of them. Made in the model's head, without its logits,
        where the head is a plain matrix.

        Accelerate divides it by `gradient_accumulation_steps`, as for one process: the mean of the
        means of batches. With `num_targets`, of all batches of a step and all data-parallel ranks,
        it is the mean over these. `options` as of `cross_entropy`, label_smoothing say.
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
