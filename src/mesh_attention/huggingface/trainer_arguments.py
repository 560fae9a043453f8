"""Arguments of a Trainer that are refused: what would be left out in silence, or is known to fail
later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_attention.errors import MeshAttentionError


def refuse_arguments(args: Any, more: Mapping[str, Any]) -> None:
    """args  `TrainingArguments`, or None
    more   the other arguments of the Trainer, by name"""
    wrong = {
        "compute_loss_func": "it would get this rank's logits, and targets for labels; "
        "override compute_loss, whose inputs are a sharded batch",
        "model_init": "give the model",
    }
    for name, way_out in wrong.items():
        if more.get(name) is not None:
            raise MeshAttentionError(f"{name} is not supported: {way_out}")
    if args is None:
        return
    config = args.accelerator_config
    refused = {
        "parallelism_config": (
            args.parallelism_config is not None,
            "accelerate's own context parallelism; leave it out, cp_size says all",
        ),
        "deepspeed": (bool(args.deepspeed), "it reduces gradients in its own way"),
        "fsdp": (bool(args.fsdp), "FSDP2 with a loop of your own is in docs/training.md"),
        "torch_compile": (
            bool(args.torch_compile),
            "it compiles what DDP wraps; in a loop of your own torch.compile(model) is fine",
        ),
        "use_liger_kernel": (bool(args.use_liger_kernel), "it makes losses inside the model"),
        "neftune_noise_alpha": (
            bool(args.neftune_noise_alpha),
            "its noise depends on the length, and ranks have a part of it",
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
        "accelerator_config.dispatch_batches": (
            bool(config is not None and config.dispatch_batches),
            "every rank reads its own batches",
        ),
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
    for name, (is_given, why) in refused.items():
        if is_given:
            raise MeshAttentionError(f"{name} is not supported with context parallelism: {why}")
