"""Training on ranks as users write it: batches of many kinds, and a tiny GPT whose attention is
that of a `ContextParallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesh_attention import ContextParallel, MeshAttentionError
from mesh_attention.train.sharded_batch import ShardedBatch
from support.tiny_gpt import WholeCase, make_model, one_process

__all__ = [
    "ALL",
    "FEW",
    "LEFT",
    "PACKED",
    "PLAIN",
    "POSITIONS",
    "RATE",
    "RIGHT",
    "ROWS",
    "Steps",
    "Trained",
    "logits_of",
    "make",
    "refusal",
    "sharded",
    "truth",
    "truth_and_parameters",
]

RATE = 0.5
Steps = list[list[WholeCase]]  # the batches of all data-parallel ranks, for each step
Trained = list[tuple[float, list[Tensor]]]  # loss and gradients of each step

PACKED = WholeCase({"cu_seqlens": [0, 9, 10, 37]}, [[0, 9, 10, 37]])
PLAIN = WholeCase({}, [[0, 19]] * 2)
ROWS = WholeCase({"cu_seqlens": [[0, 4, 23], [0, 17, 18, 23]]}, [[0, 4, 23], [0, 17, 18, 23]])
POSITIONS = WholeCase({"position_ids": torch.tensor([[*range(5), *range(12)]])}, [[0, 5, 17]] * 2)
RIGHT = WholeCase(
    {"attention_mask": torch.arange(21) < torch.tensor([[21], [13], [5]])},
    [[0, 21], [0, 13, 21], [0, 5, 21]],
    [0, 8, 16],
)
LEFT = WholeCase(
    {"attention_mask": (torch.arange(11) >= torch.tensor([[3], [3]])).long()},
    [[0, 3, 11]] * 2,
    [-3, -3],
)
ALL = [PACKED, PLAIN, ROWS, POSITIONS, RIGHT, LEFT]


class FewTargets(WholeCase):
    """All in one place, so that most ranks have none."""

    @property
    def labels(self) -> Tensor:
        labels = torch.full_like(self.input_ids, -100)
        labels[0, 2:4] = self.input_ids[0, 2:4]
        return labels


FEW = FewTargets({}, [[0, 33]])


def make(group: Any = None) -> ContextParallel:
    return ContextParallel(group, causal=True)


def sharded(cp: ContextParallel, case: WholeCase, **changes: Any) -> ShardedBatch:
    arguments = {"input_ids": case.input_ids, "labels": case.labels, **case.arguments, **changes}
    return cp.shard_batch(**arguments)


def logits_of(cp: ContextParallel, model: Any, batch: ShardedBatch) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = cp.attention(q, k, v, documents=batch.documents)
        assert isinstance(out, Tensor)
        return out

    logits: Tensor = model(batch.input_ids, batch.position_ids, attention)
    return logits


def truth(rank: int, world_size: int, steps: Steps) -> Trained:
    """In a process of the pool, which has imported all that gradients and optimizers import."""
    return one_process(steps, RATE)


def truth_and_parameters(rank: int, world_size: int, steps: Steps) -> tuple[Trained, list[Tensor]]:
    model = make_model()
    return one_process(steps, RATE, model), [p.detach() for p in model.parameters()]


def refusal(action: Any) -> str:
    try:
        action()
    except MeshAttentionError as error:
        return str(error)
    return "nothing"
