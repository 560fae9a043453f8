"""Trainers of TRL on data-parallel by context-parallel ranks.

    from mesh_attention.huggingface.trl import ContextParallelSFTTrainer
    trainer = ContextParallelSFTTrainer(model, args, ..., cp_size=4)

The trainers are TRL's own, which see whole batches and outputs: losses, packing, masks and metrics
are TRL's. A class of your own is `class T(ContextParallelMixin, SFTTrainer)`.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.utils import gather, set_seed
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.trainer import ContextParallelMixin

try:
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer
    from trl.trainer import grpo_trainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise MeshAttentionError("trl is not installed: pip install 'trl>=1.15,<1.17'") from error

__all__ = [
    "ContextParallelDPOTrainer",
    "ContextParallelGRPOTrainer",
    "ContextParallelRewardTrainer",
    "ContextParallelSFTTrainer",
]


class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer):
    __doc__ = ContextParallelMixin.__doc__


class ContextParallelDPOTrainer(ContextParallelMixin, DPOTrainer):
    __doc__ = ContextParallelMixin.__doc__


class ContextParallelRewardTrainer(ContextParallelMixin, RewardTrainer):
    __doc__ = ContextParallelMixin.__doc__


class ContextParallelGRPOTrainer(ContextParallelMixin, GRPOTrainer):
    """As `ContextParallelMixin`. Each rank of a group generates completions from whole sequences;
    those of its first rank count, and so do its rewards.

    `generation_batch_size` is per_device_train_batch_size times data-parallel ranks times
    steps_per_generation, of the arguments.
    """

    _generates_whole = True

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        args, dp = self.args, self.mesh["dp"]
        size = args.per_device_train_batch_size * dp.size() * args.steps_per_generation
        evaluated = args.per_device_eval_batch_size * dp.size()
        wanted = [
            ("per_device_train_batch_size * steps_per_generation", size, self.num_generations)
        ]
        if args.eval_strategy != "no":
            wanted.append(("per_device_eval_batch_size", evaluated, self.num_generations_eval))
        for name, number, divisor in wanted:
            if number % divisor:
                raise MeshAttentionError(
                    f"{name} is {number} completions on {dp.size()} data-parallel ranks, and must "
                    f"be a multiple of the {divisor} generations of a prompt"
                )
        args.generation_batch_size = size
        texts = {name: deque(x, size) for name, x in self._logs.items() if isinstance(x, deque)}
        self._logs.update(texts)
        set_seed(args.seed + dp.get_local_rank())  # ranks of a group draw the same tokens

    def _generate(self, prompts: list[Any]) -> Any:
        with ExitStack() as blocks:
            for model in self._whole_models:
                blocks.enter_context(model.cp.own_attention())
            if self.is_fsdp_enabled:  # ranks, which share parameters, then stop together
                mark = patch.object(self.cp.model, "_is_fsdp_managed_module", True, create=True)
                blocks.enter_context(mark)
            completions = [super()._generate(prompts)]
        # Kernels may round differently, and tools may answer differently.
        dist.broadcast_object_list(completions, group=self.mesh["cp"].get_group(), group_src=0)
        return completions[0]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL gathers rewards and texts from all ranks; here from the first of each group alone."""
        with (
            patch.object(grpo_trainer, "gather", self._from_first_ranks),
            patch.object(grpo_trainer, "gather_object", self.accelerator.gather_objects),
        ):
            batch = super()._generate_and_score_completions(inputs)
        self._draw_alike()
        return batch

    def _draw_alike(self) -> None:
        """Gives ranks of a group one random state, so that they shuffle scored completions alike: a
        reward may have drawn random numbers on some of them."""
        cuda = self.args.device.type == "cuda"
        states: list[Any] = [torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None]
        dist.broadcast_object_list(states, group=self.mesh["cp"].get_group(), group_src=0)
        torch.set_rng_state(states[0])
        if cuda:
            torch.cuda.set_rng_state(states[1])

    def _from_first_ranks(self, x: Tensor) -> Tensor:
        of_all: Tensor = gather(x).unflatten(0, (dist.get_world_size(), -1))
        return of_all[:: self.cp_size].flatten(0, 1)
