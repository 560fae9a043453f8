"""A batch of a Trainer: this rank's part, and the whole for what cannot do with a part: a loss that
somebody else wrote, and noise whose size depends on the length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from mesh_attention.train.sharded_batch import ShardedBatch


@dataclass(frozen=True, eq=False)
class TrainerBatch(ShardedBatch):
    """
    whole  the batch as data_collator made it, on the CPU: labels are not shifted
    """

    whole: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(part: ShardedBatch, whole: Mapping[str, Any]) -> TrainerBatch:
        of_part = {x.name: getattr(part, x.name) for x in fields(ShardedBatch)}
        return TrainerBatch(**of_part, whole=whole)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TrainerBatch:
        return TrainerBatch.of(super().to(device, non_blocking=non_blocking), self.whole)


def shifts_labels(model: Any) -> bool:
    """Whether its labels are those of each token itself and the next one is learned. Not of models
    that classify tokens or fill in masked ones."""
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


class EmbeddingNoise:
    """NEFTune: `alpha / sqrt(length * width)`, of whole sequences. A hook of the embeddings."""

    def __init__(self, embeddings: nn.Module, alpha: float, rank: int) -> None:
        self._alpha, self._rank = alpha, rank
        self.length = 0  # of the batch that is trained on; 0: none is
        self._hook = embeddings.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        if not (module.training and self.length):
            return embedded
        most = self._alpha / sqrt(self.length * embedded.shape[-1])
        # Other noise on each rank of a group, though their seeds are the same.
        seed = int(torch.randint(2**32, ())) + self._rank
        chance = torch.Generator(embedded.device).manual_seed(seed)
        return embedded + torch.empty_like(embedded).uniform_(-most, most, generator=chance)

    def remove(self) -> None:
        self._hook.remove()
