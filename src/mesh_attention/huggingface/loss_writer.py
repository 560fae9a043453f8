"""Whose `compute_loss` a Trainer has: one that is written for one process sees whole batches.

What is wrong in silence is refused: it would get labels that are shifted and cut, or generate from
a part of a sequence.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.versions import check_version

TESTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer")  # of TRL


def refuse_order(trainer: type, mixin: type) -> None:
    """Behind `Trainer` the mixin would do nothing, in silence."""
    classes = trainer.__mro__
    if Trainer in classes and classes.index(Trainer) < classes.index(mixin):
        raise MeshAttentionError(
            f"{trainer.__name__} names {mixin.__name__} last, where it does nothing: class "
            f"{trainer.__name__}({mixin.__name__}, ...)"
        )


def loss_writer(trainer: type, mixin: type) -> Any:
    """The class whose `compute_loss` is called, but for ours."""
    writers = (x for x in trainer.__mro__ if "compute_loss" in vars(x))
    return next(x for x in writers if x is not mixin)


def takes_whole_batches(trainer: type, mixin: type) -> bool:
    writer = loss_writer(trainer, mixin)
    return writer is not Trainer and not vars(writer).get("takes_sharded_batches", False)


def refuse_trainer(trainer: type, *, generates: bool, untested: bool) -> None:
    """generates  whether somebody sees to it that the model generates from whole sequences"""
    of_trl = [x for x in trainer.__mro__ if x.__module__.split(".")[0] == "trl"]
    if not of_trl:
        return
    check_version("trl")  # whose head gives log-probabilities of labels that are shifted already
    name = of_trl[0].__name__
    if hasattr(trainer, "_generate") and not generates:
        raise MeshAttentionError(
            f"{name} generates, and needs more than ContextParallelMixin: take (or inherit from) "
            "mesh_attention.huggingface.trl.ContextParallelGRPOTrainer; other trainers of TRL that "
            "generate are not supported"
        )
    if not untested and not any(x.__name__ in TESTED for x in of_trl):
        raise MeshAttentionError(
            f"{name} of TRL has not been shown to be exact on ranks; known: {', '.join(TESTED)}. "
            "With cp_options={'untested': True} it is taken: compare its loss with one process"
        )
