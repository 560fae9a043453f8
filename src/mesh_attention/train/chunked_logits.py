"""Logits of some tokens at a time, and the way back of their gradient.

Logits are the largest tensors of training: 32 GiB in float32 for 65,536 tokens and a vocabulary of
131,072. Nothing here holds more than two such tensors of a chunk, in either pass.

N tokens, H the width of hidden states, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**27  # logits of a chunk: 512 MiB in float32. Fewer, and adding up dW (V x H) takes over
_CHUNK_OF_LOGITS = 2**25  # where they are there already, and nothing is multiplied
_PARTS = 16  # of logits, so that two chunks of them in float32 are little beside those in 16 bits
_FEWEST = 2**18  # fewer are no memory to speak of, and many launches


@dataclass(frozen=True)
class Head:
    """From hidden states to logits: `hidden @ weight.T + bias`, or what was given, where there is
    no weight; then `softcap`, then divided by `temperature`.

    dtype   of products, as autocast says; sums are float32 or better
    """

    dtype: torch.dtype
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None

    @property
    def precise(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def low(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.to(self.dtype)

    def chunks(self, x_NH: Tensor, weight_VH: Tensor | None) -> Iterator[slice]:
        size, tokens = self.chunk_tokens, len(x_NH)
        if size is None and weight_VH is not None:
            size = _CHUNK // len(weight_VH)
        elif size is None:
            vocabulary = x_NH.shape[1]
            parts = min(tokens // _PARTS, _CHUNK_OF_LOGITS // vocabulary)
            size = max(parts, _FEWEST // vocabulary)
        size = max(size, 1)
        return (slice(at, at + size) for at in range(0, tokens, size))

    def chunk(self, x_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None) -> LogitsChunk:
        if weight_VH is None:
            logits = x_NH
        else:
            logits = _product(x_NH.to(self.dtype), weight_VH.T, self.precise)
            if bias_V is not None:
                logits.add_(bias_V)
        capped = None
        if self.softcap is not None:
            logits = capped = logits.to(self.precise).div(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            logits = logits.to(self.precise) / self.temperature
        return LogitsChunk(logits, torch.log_softmax(logits, -1, dtype=self.precise), capped)

    def before_head(self, chunk: LogitsChunk, grad_NV: Tensor) -> Tensor:
        """The gradient of what the matrix gave, from that of the logits, whose memory it takes."""
        if self.temperature != 1:
            grad_NV.div_(self.temperature)
        if chunk.capped is not None and self.softcap is not None:
            grad_NV.mul_(chunk.capped.div_(self.softcap).square_().neg_().add_(1))
            chunk.capped = None
        return grad_NV


@dataclass
class LogitsChunk:
    """`logits` are let go, by whoever needs them last; `capped` are kept for the gradient of
    softcap."""

    logits: Tensor | None
    log_probs: Tensor
    capped: Tensor | None

    def log_sum_exp(self) -> Tensor:
        assert self.logits is not None
        return self.logits.amax(-1).to(self.log_probs.dtype) - self.log_probs.amax(-1)


class Gradients:
    """Of hidden states, weight and bias, those that are `needed`, chunk after chunk. That of the
    weight is added up in float32 or better."""

    def __init__(
        self,
        head: Head,
        inputs: tuple[Tensor, Tensor | None, Tensor | None],
        needed: Sequence[bool],
    ) -> None:
        x_NH, *weight_and_bias = [x if needed[at] else None for at, x in enumerate(inputs)]
        self.x = None if x_NH is None else torch.empty_like(x_NH)
        self.weight, self.bias = (
            None if x is None else torch.zeros_like(x, dtype=head.precise) for x in weight_and_bias
        )
        self._head = head

    def add(self, rows: slice, x_NH: Tensor, weight_VH: Tensor | None, grad_NV: Tensor) -> None:
        """Of the logits of some rows; x are the hidden states of these."""
        dtype = self._head.dtype
        if self.bias is not None:
            self.bias.add_(grad_NV.sum(0))
        if weight_VH is None:
            if self.x is not None:
                self.x[rows] = grad_NV
            return
        low = grad_NV.to(dtype)
        if self.weight is not None:
            if _multiplies_into_float32(low):
                torch.addmm(
                    self.weight, low.T, x_NH.to(dtype), out_dtype=torch.float32, out=self.weight
                )
            else:
                self.weight.addmm_(grad_NV.T, x_NH.to(grad_NV.dtype))
        if self.x is not None:
            self.x[rows] = low @ weight_VH

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.x, self.weight, self.bias


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if _multiplies_into_float32(a):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _multiplies_into_float32(x: Tensor) -> bool:
    """Of 16 bits: kernels that add up in float32 anyway, and need not round the result."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
