"""The `Trainer` of transformers on data-parallel by context-parallel ranks."""

from __future__ import annotations

from transformers import Trainer

from mesh_attention.huggingface.trainer_mixin import ContextParallelMixin


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    __doc__ = ContextParallelMixin.__doc__
