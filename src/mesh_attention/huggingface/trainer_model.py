"""What the Trainer (and `AcceleratorContextParallel`) does to a model that accelerate wraps:
gradients must be averaged over all ranks, FSDP2 works on CPUs too, checkpoints keep the results of
attention, and NEFTune's noise has the size that whole sequences say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.model_checks import transformers_model
from mesh_attention.runtime.session.distributed_tensors import is_dtensor
from mesh_attention.train.keep_attention import KeepAttention


def shard_on_cpu(accelerator: Any, args: Any) -> bool:
    """Makes accelerate shard with FSDP2 on processes without a GPU, where it would take DDP in
    silence. All that it does for FSDP2 works there once its state says so. Returns False, and does
    nothing, where it runs on GPUs or on one process."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if "activation_checkpointing" in args.fsdp_config:  # old versions tell it to GPUs' alone
        plugin.activation_checkpointing = bool(args.fsdp_config["activation_checkpointing"])
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # which wants a GPU
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return True


def is_sharded(model: nn.Module) -> bool:
    inside = getattr(model, "_orig_mod", None)  # of torch.compile
    return isinstance(model, FSDPModule) or isinstance(inside, FSDPModule)


@contextmanager
def prepared_once(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Inside, `accelerator.prepare` prepares only the optimizer of a model that is sharded already,
    by an evaluation or another training. Accelerate would nest its checkpoints; and it finds
    parameters by their addresses, which shards without rows do not have, so that the state of the
    optimizer that it saves would be wrong."""
    prepare = accelerator.prepare

    def of_optimizer(*objects: Any, **options: Any) -> Any:
        if not any(x is model for x in objects):
            return prepare(*objects, **options)
        if model not in accelerator._models:
            accelerator._models.append(model)
        return tuple(x if x is model else accelerator.prepare_optimizer(x) for x in objects)

    with patch.object(accelerator, "prepare", of_optimizer if is_sharded(model) else prepare):
        yield


def reshard(model: nn.Module) -> None:
    """Shards parameters again that FSDP2 leaves whole after a forward pass without backward. An
    optimizer that is made then would train copies of them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def refuse_unreduced(model: nn.Module) -> None:
    """Raises unless DDP or FSDP2 average gradients over all ranks: losses are scaled for that."""
    world_size = dist.get_world_size()
    inside: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    if world_size == 1 or isinstance(inside, DistributedDataParallel):
        return
    if not is_sharded(model):
        raise MeshAttentionError(
            f"the model is wrapped by {type(model).__name__}, and neither by "
            "DistributedDataParallel nor by FSDP2 (fsdp=True), so gradients would not be averaged "
            "over all ranks"
        )
    parameter: Any
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not (
            is_dtensor(parameter) and parameter.device_mesh.size() == world_size
        ):
            raise MeshAttentionError(
                f"{name} is trained and not sharded over all {world_size} ranks, so its gradients "
                "would not be averaged over them: leave ignored_modules out, or freeze it"
            )


def router_weight(model: nn.Module) -> float:
    """The weight of the loss that balances experts; 0 where the config does not ask for it."""
    config = transformers_model(model).config.get_text_config()
    is_asked = getattr(config, "output_router_logits", False)
    return float(config.router_aux_loss_coef) if is_asked else 0.0


def is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def keep_attention(model: nn.Module, keep: KeepAttention) -> None:
    """Gives `keep` to the checkpoints that transformers and accelerate have put into the model, if
    they have no `context_fn`. Reentrant ones take none: they attend a second time."""
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


class EmbeddingNoise:
    """NEFTune: a hook that adds noise of size `alpha / sqrt(length * width)` to embeddings, where
    `length` is that of whole sequences."""

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
