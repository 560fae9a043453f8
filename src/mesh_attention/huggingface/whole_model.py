"""`WholeModel`: a model on ranks that looks like a model on one process. Whole batches go in, whole
outputs come out. The Trainer uses it for losses that it does not know.

Such losses (TRL's, overrides of `compute_loss`) shift logits and count tokens themselves, so they
must never see a shard. Each rank of the group computes the same loss from the whole outputs, and
gets the gradient of its own tokens, times the size of the group: DDP and FSDP2 take the mean over
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import signature
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.errors import MeshAttentionError
from mesh_attention.huggingface.attention import NAME
from mesh_attention.huggingface.model import ModelContextParallel
from mesh_attention.huggingface.model_hooks import pools
from mesh_attention.huggingface.trainer_model import EmbeddingNoise
from mesh_attention.train.sharded_batch import ShardedBatch

# Arguments of the model: those that `shard_batch` takes, and those that models ignore (they tell
# kernels of one process, or losses, about documents).
_TOKENS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_UNUSED = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "margin")


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of the model that its outputs and its loss are made by."""

    part: ShardedBatch
    labels: Tensor | None
    shift_labels: Tensor | None
    num_items_in_batch: Any
    is_fused: bool  # TRL's head, which gives log-probabilities in place of logits


class WholeModel:
    """Hooks of a model that a `ModelContextParallel` was made for.

    Outputs of one number a token are cheap to join. Such are TRL's log-probabilities: each rank
    makes those of its own tokens, by `log_probs` of the object. Logits take tokens times
    vocabulary, on every rank, as on one process.
    """

    def __init__(self, cp: ModelContextParallel) -> None:
        self.cp, model = cp, cp.model
        self.noise: EmbeddingNoise | None = None
        self._names = [*signature(type(model).forward).parameters][1:]
        self._call: _Call | None = None
        self._hooks = (
            # Before the hook of the object, which refuses whole batches.
            model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._join),
        )
        _take_log_probs(model, cp)

    @staticmethod
    def of(model: nn.Module, group: DeviceMesh, options: Mapping[str, Any]) -> WholeModel:
        """With a `ModelContextParallel` made for it. Scores of sequences are joined as one number a
        token. Other heads for sequences stay outside of it, and get whole hidden states."""
        own: Any = getattr(model, "get_base_model", lambda: model)()  # of peft
        if pools(own):
            options = {**options, "reduce": "ddp"}  # or FSDP2, which takes a mean too
        elif type(own).__name__.endswith("ForSequenceClassification"):
            model = own.base_model
        return WholeModel(ModelContextParallel(model, group, **options))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.cp.close()

    def _shard(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the model: its arguments for this rank's part of the batch."""
        self._call = None
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        attends_by_itself = model.config._attn_implementation != NAME  # as when it generates
        if attends_by_itself or arguments.get("documents") is not None:  # sharded by the caller
            return None
        whole = {name: arguments.pop(name, None) for name in _TOKENS}
        labels, targets = (arguments.pop(name, None) for name in ("labels", "shift_labels"))
        num_items = arguments.pop("num_items_in_batch", None)
        starts = arguments.pop("cu_seq_lens_q", None)
        passed = {name: x for name, x in arguments.items() if name not in _UNUSED}
        for name, x in passed.items():
            if isinstance(x, Tensor):
                raise MeshAttentionError(
                    f"{name} was given to the model, and it is not known how its tokens are to be "
                    f"cut; known: {', '.join((*_TOKENS, 'labels'))}"
                )
        if whole["input_ids"] is None:
            raise MeshAttentionError("give the model input_ids, of (batch, tokens)")
        if self.noise is not None:
            self.noise.length = whole["input_ids"].shape[1]
        device = whole["input_ids"].device
        is_fused = bool(passed.get("fused_lm_head"))
        if is_fused:  # all other losses are made of whole outputs
            whole["labels"] = labels if targets is None else targets
        # On the host, where documents are read, and ranks compare that they have the same batch.
        on_host = {name: None if x is None else x.cpu() for name, x in whole.items()}
        part = self.cp.shard_batch(cu_seqlens=starts, shift_labels=targets is None, **on_host)
        part = part.to(device)
        self._call = _Call(part, labels, targets, num_items, is_fused)
        passed |= part.model_inputs() | {"use_cache": False, "return_dict": True}
        if is_fused:
            passed["shift_labels"] = part.labels
        return (), passed

    def _join(self, model: Any, args: Any, output: Any) -> Any:
        """Behind it: whole outputs, and their loss."""
        call, self._call = self._call, None
        if call is None:
            return None
        size = call.part.position_ids.shape
        joined = {name: x for name, x in output.items() if name not in ("loss", "past_key_values")}
        done = {"logits": joined.pop("logits")} if pools(model) else {}  # whole already
        narrow = [name for name, x in joined.items() if isinstance(x, Tensor) and x.shape == size]
        if narrow:  # one number a token: all of them at once
            dtype = torch.promote_types(joined[narrow[0]].dtype, torch.float32)
            numbers = torch.stack([joined[name].to(dtype) for name in narrow], -1)
            for name, x in zip(narrow, self._whole(call, numbers).unbind(-1), strict=True):
                shown = x if call.shift_labels is not None else x[:, :-1]
                joined[name] = shown.to(joined[name].dtype)
        for name, x in joined.items():
            if name in narrow:
                continue
            layers = x if isinstance(x, tuple) else (x,)
            if not all(isinstance(y, Tensor) and y.shape[:2] == size for y in layers):
                raise MeshAttentionError(
                    f"{name} of the model's output is not of (batch, tokens, ...), so what ranks "
                    "have of it cannot be put together; ask the model for logits, log-probabilities"
                    " or hidden states"
                )
            whole = tuple(self._whole(call, y.contiguous()) for y in layers)
            joined[name] = whole if isinstance(x, tuple) else whole[0]
        joined |= done
        return type(output)(**joined | self._loss(model, call, joined))

    def _whole(self, call: _Call, x: Tensor) -> Tensor:
        return self.cp.unshard(x, 1, documents=call.part.documents, grad="sum")

    def _loss(self, model: Any, call: _Call, outputs: dict[str, Any]) -> dict[str, Any]:
        """The loss of the whole batch, as the model makes it."""
        number = call.num_items_in_batch
        if call.is_fused:
            counted = outputs["label_mask"].sum().clamp(min=1) if number is None else number
            return {"loss": -outputs["log_probs"].sum() / counted}
        if call.labels is None and call.shift_labels is None:
            return {}
        more = {"num_items_in_batch": number, "shift_labels": call.shift_labels}
        vocabulary = model.config.get_text_config().vocab_size
        logits = "pooled_logits" if pools(model) else "logits"
        loss = model.loss_function(
            **{logits: outputs["logits"]},
            labels=call.labels,
            vocab_size=vocabulary,
            config=model.config,  # which losses of classes read
            **{name: x for name, x in more.items() if x is not None},
        )
        return {"loss": loss}

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModel:
        return self  # as the hook of the object: copies of the model share it


_KERNEL = "_ChunkedLogProbFunction"  # of TRL, with these parameters
_PARAMETERS = (
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
_STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")  # in the order of TRL


def _take_log_probs(model: Any, cp: ModelContextParallel) -> None:
    """TRL's head looks up the function that makes log-probabilities among the globals of its
    module. The head of this model gets other globals, with `_log_probs` in its place."""
    forward = vars(model).get("forward")
    trls: Any = getattr(forward, "__func__", None)
    kernel = getattr(trls, "__globals__", {}).get(_KERNEL)
    if kernel is None or [*signature(kernel.forward).parameters][1:] != [*_PARAMETERS]:
        return  # no fused head, or one of another version: it makes them as ever
    parts = (trls.__name__, trls.__defaults__, trls.__closure__)
    kernel = SimpleNamespace(apply=partial(_log_probs, cp))
    ours = FunctionType(trls.__code__, trls.__globals__ | {_KERNEL: kernel}, *parts)
    ours.__kwdefaults__ = trls.__kwdefaults__
    model.forward = MethodType(update_wrapper(ours, trls), model)


def _log_probs(
    cp: ModelContextParallel,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    outputs: Sequence[str],
) -> list[Tensor | None]:
    """From `hidden` of (tokens, width): log-probabilities, entropies, and the statistics that are
    in `outputs`, None for others."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
    if scale != 1:
        hidden, bias = hidden * scale, None if bias is None else bias * scale
    statistics = [name for name in _STATISTICS if name in outputs]
    how: dict[str, Any] = {"bias": bias, "temperature": temperature, "softcap": softcap}
    results = cp.log_probs(hidden, targets, weight=weight, statistics=statistics, **how)
    made = dict(zip(("log_probs", "entropy", *statistics), results, strict=True))
    return [made.get(name) for name in ("log_probs", "entropy", *_STATISTICS)]
