"""Arguments of a Trainer that are refused: what would be left out in silence, or is known to fail
later."""

from __future__ import annotations

from typing import Any

from mesh_attention.huggingface.accelerator_ranks import refuse, refuse_accelerator


def refuse_arguments(args: Any) -> None:
    """`TrainingArguments`, or None, before anything is made of them."""
    if args is None:
        return
    liger = args.liger_kernel_config or {}
    refused = {
        "parallelism_config": (
            args.parallelism_config is not None,
            "accelerate's own context parallelism; leave it out, cp_size says all",
        ),
        "FSDP1": (
            (args.fsdp_plugin_args or {}).get("fsdp_version", 2) != 2,
            "take FSDP2, fsdp_config={'version': 2}",
        ),
        "use_liger_kernel": (
            bool(args.use_liger_kernel)
            and (liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")),
            "it would make the loss, too; with liger_kernel_config="
            "{'fused_linear_cross_entropy': False} its other kernels are taken",
        ),
        "auto_find_batch_size": (
            bool(args.auto_find_batch_size),
            "a call that one rank breaks off is an error on all of them",
        ),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "losses are means over the targets of all ranks",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
            "it deals batches to all ranks, and those of a sequence need the same",
        ),
        "eval_use_gather_object": (bool(args.eval_use_gather_object), "tensors are gathered"),
        "use_vllm": (
            bool(getattr(args, "use_vllm", False)),
            "it deals prompts out to all ranks, and those of a sequence need the same",
        ),
        "use_transformers_continuous_batching": (
            bool(getattr(args, "use_transformers_continuous_batching", False)),
            "it attends in its own way; generate without it",
        ),
        "several GPUs in one process": (args.n_gpu > 1, "start a process for each, with torchrun"),
    }
    refuse(refused)


def refuse_settings(trainer: Any) -> None:
    """What is known when a Trainer is made: of the model, and of its Accelerator."""
    config = getattr(trainer.model, "config", None)
    refused = {
        "router_aux_loss_coef": (  # which TRL takes from the config of the model, too
            bool(getattr(trainer, "aux_loss_enabled", False)),
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
