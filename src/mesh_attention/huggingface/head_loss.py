"""The loss of a causal language model, made in its head, so that its logits are never there.

FSDP2 has the whole weight of a head in the forward of the head alone. There the loss is made, and a
few known numbers are returned in the place of logits. What the model does with logits after its
head, a scale or a softcap, is read off from what it makes of these numbers. They also carry the
graph: DDP and FSDP2 look for it in what the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mesh_attention.runtime.session.modes import outside_compile
from mesh_attention.train.means import TokenMean

# Of hidden states and the head's weight; softcap and bias by name.
Loss = Callable[..., TokenMean]

# No powers of two among them, which rounding to 16 bits leaves alone. The second is beyond any cap.
_PROBES = (1.0, 1e5, -2.7, 0.3, 7.7, -61.0)


def _probes(vocabulary: int, like: torch.device | None = None) -> Tensor:
    """For one token, over the whole vocabulary: models may treat parts of it otherwise."""
    return torch.tensor(_PROBES, device=like).repeat(-(-vocabulary // len(_PROBES)))[:vocabulary]


class HeadLoss:
    """Stands in the head of one model, until `remove()`."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self._head = head
        self._after, self._is_known = _AfterHead(), False
        self._loss: Loss | None = None
        self._means: list[tuple[TokenMean, _Gradient]] = []
        self._seen: Tensor | None = None
        head.forward = self._forward  # type: ignore[method-assign]
        self._hook = model.register_forward_hook(self._look, prepend=True)

    @staticmethod
    def of(model: Any) -> HeadLoss | None:
        """None where the head is no plain matrix: one with LoRA, say."""
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        if not plain or "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
            return None
        return HeadLoss(model, head)

    def remove(self) -> None:
        self._hook.remove()
        del self._head.forward

    def mean(self, model: nn.Module, inputs: Mapping[str, Any], loss: Loss) -> TokenMean | None:
        """Of a forward pass of `model`, wrapped or not. None where what the model does after its
        head is neither a scale nor a softcap: its logits are needed then. All ranks see the same
        numbers, and so the same here."""
        outputs, means, seen = self._run(model, inputs, loss)
        if len(means) != 1:
            return None
        if not self._is_known:  # read once: the host waits for it
            after = None if seen is None else _AfterHead.of(seen, len(self._head.weight))
            if after is None:
                return None
            self._is_known = True
            if after != self._after:
                self._after = after
                return self.mean(model, inputs, loss)
        mean, gradient = means[0]
        emerged: Tensor = _Emerge.apply(outputs.logits, mean.loss.detach(), gradient)  # type: ignore[no-untyped-call]
        return replace(mean, loss=emerged)

    def _run(self, model: nn.Module, inputs: Mapping[str, Any], loss: Loss) -> tuple[Any, Any, Any]:
        self._loss, self._means, self._seen = loss, [], None
        try:
            outputs = model(**inputs)
            return outputs, self._means, self._seen
        finally:
            self._loss, self._means, self._seen = None, [], None

    @outside_compile
    def _forward(self, hidden: Tensor) -> Tensor:
        head, loss = self._head, self._loss
        if loss is None:
            return nn.functional.linear(hidden, head.weight, head.bias)
        scale, bias = self._after.scale, head.bias
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        mean = loss(hidden, head.weight, bias=bias, softcap=self._after.softcap)
        gradient = _Gradient()
        self._means.append((mean, gradient))
        carried: Tensor = _Carry.apply(mean.loss, len(head.weight), gradient)  # type: ignore[no-untyped-call]
        return carried

    @outside_compile
    def _look(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """Before FSDP2 casts what the model returns."""
        logits = getattr(outputs, "logits", None)
        if self._loss is not None and isinstance(logits, Tensor):
            self._seen = logits.detach()


@dataclass(frozen=True)
class _AfterHead:
    """logits * scale, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(seen: Tensor, vocabulary: int) -> _AfterHead | None:
        """From what became of the probes."""
        if seen.shape != (1, 1, vocabulary) or vocabulary < len(_PROBES):
            return None
        y, x = seen[0, 0].double().cpu(), _probes(vocabulary).double()
        scale, softcap = y[0], None
        if not torch.isclose(y[1], scale * x[1], rtol=1e-3):
            softcap = y[1]
            scale = softcap * torch.atanh(y[0] / softcap)
        wanted = scale * x if softcap is None else softcap * torch.tanh(scale * x / softcap)
        if not (scale > 0 and torch.allclose(y, wanted, rtol=1e-4)):
            return None
        if abs(scale - 1) < 1e-6:  # one that went through tanh
            scale = torch.tensor(1.0)
        return _AfterHead(scale.item(), None if softcap is None else softcap.item())


class _Gradient:
    """Of the loss, on its way past what the model does with its logits."""

    value: Tensor | None = None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, vocabulary: int, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return _probes(vocabulary, loss.device)[None, None]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        return ctx.gradient.value, None, None


class _Emerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, logits.shape
        ctx.kind = {"dtype": logits.dtype, "device": logits.device}
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.gradient.value = grad
        return torch.zeros(ctx.shape, **ctx.kind), None, None
