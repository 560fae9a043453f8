"""`ModelLoss`: the loss of a causal language model, computed in its head, so that its logits never
exist. `ContextParallelTrainer` and `AcceleratorContextParallel` use it.

FSDP2 has the whole weight of a head only in the head's forward. So the loss is computed there, and
the head returns a few known numbers (probes) in place of logits: they carry the graph through the
model's outputs, where DDP and FSDP2 look for it. If the model scales or softcaps its logits, the
loss must too: scale and softcap are read off, once, from what the model makes of the probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from math import atanh, isclose
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.utils import logging

from mesh_attention.huggingface.model import ModelContextParallel
from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.train.means import TokenMean

# No powers of two among them, which rounding to 16 bits leaves alone. The second is beyond any cap.
_PROBES = (1.0, 1e5, -2.7, 0.3, 7.7, -61.0)


def _probes(vocabulary: int, device: torch.device | None = None) -> Tensor:
    """In place of the logits of one token; models may change parts of the vocabulary."""
    times = -(-vocabulary // len(_PROBES))
    return torch.tensor(_PROBES, device=device).repeat(times)[:vocabulary][None, None]


class ModelLoss:
    """The loss of the model of `cp`. With `in_head` it is made in the head, whose forward this
    replaces, if the head is a plain matrix (or one with LoRA); otherwise, and where logits are
    asked for, from logits. Make it before the model is wrapped."""

    def __init__(self, cp: ModelContextParallel, *, in_head: bool = True) -> None:
        self._cp = cp
        self._head: Any = None
        self._loss: Callable[..., TokenMean] | None = None
        self._means: list[tuple[TokenMean, list[Tensor]]] = []
        if in_head:
            self._stand_in_head(cp.model)

    def _stand_in_head(self, model: Any) -> None:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        fault = _fault_of(head)
        if fault is None:
            after = _after_head(model, head)
            if after is not None:
                self._head, self._after = head, after
                vars(head)["forward"] = self._forward
                return
            fault = "it does more with logits than to scale or to softcap them"
        logging.get_logger(__name__).warning_once(
            f"the loss of {type(model).__name__} is made from its logits, which take memory for "
            f"all tokens of a rank: {fault}"
        )

    def mean(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        labels: Tensor | None,
        *,
        logits: bool = False,
        **options: Any,
    ) -> tuple[TokenMean, Any]:
        """The loss of a forward pass of `model`, wrapped or not, and the model's outputs, in which
        logits are right only if `logits` asks for them. `options` as of `cross_entropy`."""
        if self._head is not None and not logits:
            self._loss = partial(self._cp.linear_cross_entropy, labels=labels, **options)
            try:
                outputs = model(**arguments)
                means = self._means
            finally:
                self._loss, self._means = None, []
            if len(means) == 1:
                [(mean, gradient)] = means
                # Its backward pass comes to the head by way of the outputs.
                loss = mean.loss.detach() + 0 * outputs.logits.flatten()[0]
                if loss.requires_grad:
                    loss.register_hook(gradient.append)
                return TokenMean(loss, mean.value, mean.num_targets), outputs
            self.remove()  # the model did not call its head once
        outputs = model(**arguments)
        return self._cp.cross_entropy(outputs.logits, labels, **options), outputs

    def remove(self) -> None:
        if self._head is not None:
            del vars(self._head)["forward"]
            self._head = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLoss:
        """In the head of a copy of the model."""
        twin = copy(self)
        twin._head = memo[id(self._head)]
        return twin

    @outside_compile
    def _forward(self, hidden: Tensor, *others: Any, **more: Any) -> Tensor:
        """In place of the head's: makes the loss if `mean` has asked for one."""
        head, loss, scale = self._head, self._loss, self._after.scale
        if loss is None or others or more or _fault_of_adapters(head):
            logits: Tensor = type(head).forward(head, hidden, *others, **more)
            return logits
        bias: Tensor | None = head.bias
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        how = {"bias": bias, "softcap": self._after.softcap, "low_rank": _adapters(head, hidden)}
        mean = loss(hidden, head.weight, **how)
        gradient: list[Tensor] = []
        self._means.append((mean, gradient))
        carried: Tensor = _Carry.apply(mean.loss, len(head.weight), gradient)  # type: ignore[no-untyped-call]
        return carried


def _fault_of(head: Any) -> str | None:
    """Why the loss cannot be made in this head."""
    base = head.base_layer if _has_lora(head) else head
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return f"its head is a {type(base).__name__}, and no plain matrix"
    for module in {head, base}:
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return "its head has hooks, or a forward of its own, which would see no logits"
    return _fault_of_adapters(head)


def _has_lora(head: Any) -> bool:
    return any(x.__module__ == "peft.tuners.lora.layer" for x in type(head).__mro__)


def _fault_of_adapters(head: Any) -> str | None:
    """The same of its adapters, asked in each step: they may come and go."""
    if _has_lora(head) and not (head.disable_adapters or head.merged):
        for name in head.active_adapters:
            if name in head.lora_variant or head.lora_bias.get(name, False):
                return f"adapter {name} of its head is no plain LoRA (DoRA, lora_bias=True)"
    return None


def _adapters(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two factors of peft's LoRA, of all adapters at once, as `low_rank` of the loss."""
    if not _has_lora(head) or head.disable_adapters or head.merged:
        return None
    names = [name for name in head.active_adapters if name in head.lora_A]
    if not names:
        return None
    few = []
    for name in names:
        x = head.lora_dropout[name](head._cast_input_dtype(hidden, head.lora_A[name].weight.dtype))
        few.append(head.lora_A[name](x) * head.scaling[name])
    return torch.cat(few, -1), torch.cat([head.lora_B[name].weight for name in names], -1)


class _AfterHead(NamedTuple):
    """logits * scale, then softcap * tanh(logits / softcap)."""

    scale: float
    softcap: float | None


def _after_head(model: Any, head: Any) -> _AfterHead | None:
    """From what the model makes of the probes, with its layers left out; None if it does more with
    logits than to scale and to softcap them."""
    device = head.weight.device
    probes = _probes(len(head.weight), device)
    layers = model.base_model
    if layers is model:  # whose prefix is that of a larger model
        layers = getattr(model, "model", None)
    if layers is None:
        return None
    hidden = torch.zeros(1, 1, head.in_features, device=device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with (
            patch.object(layers, "forward", lambda *_, **__: _Hidden((hidden,))),
            patch.object(head, "forward", lambda *_, **__: probes.clone()),
            torch.no_grad(),
        ):
            seen = model.forward(input_ids=ids, use_cache=False).logits.double()
    except Exception:  # of a model that is made otherwise
        return None
    return _read(seen, probes.double())


class _Hidden(tuple[Tensor]):
    """What layers return, with hidden states and no other outputs."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _read(y: Tensor, x: Tensor) -> _AfterHead | None:
    """From what the model made of probes `x`: y = scale * x, or softcap * tanh(scale * x /
    softcap). None if it is something else."""
    if y.shape != x.shape or x.numel() < len(_PROBES):
        return None
    (first, large), softcap = y[0, 0, :2].tolist(), None
    scale = first
    if not isclose(large, scale * x[0, 0, 1].item(), rel_tol=1e-3):
        if not 0 < first < large:
            return None
        softcap = large
        scale = softcap * atanh(first / softcap)
    if abs(scale - 1) < 1e-6:  # one that went through tanh
        scale = 1.0
    wanted = scale * x if softcap is None else softcap * torch.tanh(scale * x / softcap)
    is_it = scale > 0 and torch.allclose(y, wanted, rtol=1e-4)
    return _AfterHead(scale, softcap) if is_it else None


class _Carry(torch.autograd.Function):
    """Probes in place of logits. `gradient` holds that of the loss, which comes past whatever the
    model does with its logits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, vocabulary: int, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return _probes(vocabulary, loss.device).clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.pop(), None, None
