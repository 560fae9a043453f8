"""What `ContextParallelMixin` refuses: arguments that would be ignored in silence or are known to
fail later, and classes of Trainers that would compute something else on a part of a sequence."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.accelerator import check_version, refuse, refuse_accelerator

_SHOWN = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer")  # of TRL, to be exact
_REFUSED = {
    "parallelism_config": "accelerate's own context parallelism; leave it out, cp_size says all",
    "auto_find_batch_size": "a call that one rank breaks off is an error on all of them",
    "eval_use_gather_object": "tensors are gathered",
    "use_vllm": "it deals prompts out to all ranks, and those of a sequence need the same",
    "use_transformers_continuous_batching": "it attends in its own way; generate without it",
}


def refuse_arguments(args: Any) -> None:
    """Refuses `TrainingArguments` before anything is made of them. None: there are none yet."""
    if args is None:
        return
    liger = args.liger_kernel_config or {}
    refused = {name: (getattr(args, name, None), why) for name, why in _REFUSED.items()}
    refused |= {
        "FSDP1": (
            (args.fsdp_plugin_args or {}).get("fsdp_version", 2) != 2,
            "take FSDP2, fsdp_config={'version': 2}",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel
            and (liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")),
            "it would make the loss, too; with liger_kernel_config="
            "{'fused_linear_cross_entropy': False} its other kernels are taken",
        ),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "losses are means over the targets of all ranks",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
            "it deals batches to all ranks, and those of a sequence need the same",
        ),
        "several GPUs in one process": (args.n_gpu > 1, "start a process for each, with torchrun"),
    }
    refuse(refused)


def refuse_settings(trainer: Any) -> None:
    """Refuses settings of the model and of the Accelerator, once the Trainer has made it."""
    config = getattr(trainer.model, "config", None)
    refused = {
        "router_aux_loss_coef": (  # which TRL takes from the config of the model, too
            getattr(trainer, "aux_loss_enabled", False),
            "it would balance experts over this rank's tokens alone; set router_aux_loss_coef=0.0",
        ),
        "output_router_logits": (
            trainer._is_whole and getattr(config, "output_router_logits", False),
            "a compute_loss of your own would leave out the loss that balances experts; set it to "
            "False in the config",
        ),
    }
    refuse(refused)
    refuse_accelerator(trainer.accelerator)


def refuse_order(trainer: type, mixin: type) -> None:
    """Named behind `Trainer` the mixin would do nothing, in silence."""
    classes = trainer.__mro__
    if Trainer in classes and classes.index(Trainer) < classes.index(mixin):
        raise MeshAttentionError(
            f"{trainer.__name__} names {mixin.__name__} last, where it does nothing: class "
            f"{trainer.__name__}({mixin.__name__}, ...)"
        )


def takes_whole_batches(trainer: type, mixin: type) -> bool:
    """Whether `compute_loss` is that of another class than `Trainer`, and does not say that it
    takes sharded batches. Written for one process, it would shift labels that are shifted and
    cut."""
    writers = (x for x in trainer.__mro__ if "compute_loss" in vars(x) and x is not mixin)
    writer = next(writers)
    return writer is not Trainer and not vars(writer).get("takes_sharded_batches", False)


def refuse_trainer(trainer: type, *, generates: bool, untested: bool) -> None:
    """Refuses trainers of TRL that are not shown to be exact. `generates`: the class sees to it
    that the model generates from whole sequences."""
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
    if not untested and not any(x.__name__ in _SHOWN for x in of_trl):
        raise MeshAttentionError(
            f"{name} of TRL has not been shown to be exact on ranks; known: {', '.join(_SHOWN)}. "
            "With cp_options={'untested': True} it is taken: compare its loss with one process"
        )
