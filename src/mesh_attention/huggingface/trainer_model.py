"""The model of a Trainer once it is wrapped: gradients must be averaged over all ranks, and its
checkpoints keep the results of attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.session.distributed_tensors import is_dtensor
from mesh_attention.train.keep_attention import KeepAttention


def refuse_unreduced(model: nn.Module) -> None:
    """Losses are scaled for a mean over all ranks, so that is what gradients must become."""
    world_size = dist.get_world_size()
    inside: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    if world_size == 1 or isinstance(inside, DistributedDataParallel):
        return
    if not isinstance(model, FSDPModule) and not isinstance(inside, FSDPModule):
        raise MeshAttentionError(
            f"the model is wrapped by {type(model).__name__}, and neither by "
            "DistributedDataParallel nor by FSDP2 (fsdp=True), so gradients would not be averaged "
            "over all ranks"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not (
            is_dtensor(parameter) and parameter.device_mesh.size() == world_size
        ):
            raise MeshAttentionError(
                f"{name} is trained and not sharded over all {world_size} ranks, so its gradients "
                "would not be averaged over them: leave ignored_modules out, or freeze it"
            )


def is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def keep_attention(model: nn.Module, keep: KeepAttention) -> None:
    """In checkpoints that transformers and accelerate have put into the model, where nobody gave
    them a `context_fn`. Reentrant ones take none: they attend a second time."""
    for module in model.modules():
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            function = getattr(module, name, None)
            if (
                isinstance(function, partial)
                and function.func is checkpoint
                and function.keywords.get("use_reentrant") is False
                and "context_fn" not in function.keywords
            ):
                setattr(module, name, partial(function, context_fn=keep))
