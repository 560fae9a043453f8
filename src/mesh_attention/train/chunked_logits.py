"""Logits of some tokens at a time, and the way back of their gradient.

Logits are the largest tensors of training: 32 GiB in float32 for 65,536 tokens and a vocabulary of
131,072. Nothing here holds more than two such tensors of a chunk, in either pass.

N tokens, H the width of hidden states, V the vocabulary, R few columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_BYTES = 2**30  # of the logits of a chunk. Fewer, and adding up dW (V x H) takes over
_CHUNK_OF_LOGITS = 2**25  # where they are there already, and nothing is multiplied
_PARTS = 16  # of logits, so that two chunks of them in float32 are little beside those in 16 bits
_FEWEST = 2**18  # fewer are no memory to speak of, and many launches


class Factors(NamedTuple):
    """What logits are made of: `x @ weight.T + bias`, and a product of few columns besides, such as
    that of LoRA. Without a weight, x are the logits."""

    x: Tensor  # (N, H), or (N, V)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)
    few: Tensor | None = None  # (N, R)
    few_weight: Tensor | None = None  # (V, R)


@dataclass(frozen=True)
class Head:
    """From hidden states to logits: the product, then `softcap`, then divided by `temperature`.

    dtype   of products, as autocast says; sums, and products of few columns, are float32 or better
    """

    dtype: torch.dtype
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None

    @property
    def precise(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def chunks(
        self, whole: Factors, logit_bytes: int | None = None
    ) -> Iterator[tuple[slice, Factors]]:
        """Some rows after the other, and what their logits are made of. `logit_bytes`: what there
        is at a time for each logit; without it, logits and log-probabilities."""
        size, tokens, weight_VH = self.chunk_tokens, len(whole.x), whole.weight
        if weight_VH is not None:
            logit_bytes = logit_bytes or 2 * self.precise.itemsize
            size = size or _CHUNK_BYTES // (logit_bytes * len(weight_VH))
            whole = whole._replace(weight=weight_VH.to(self.dtype))
        elif size is None:
            vocabulary = whole.x.shape[1]
            parts = min(tokens // _PARTS, _CHUNK_OF_LOGITS // vocabulary)
            size = max(parts, _FEWEST // vocabulary)
        size = max(size, 1)
        for at in range(0, tokens, size):
            rows = slice(at, at + size)
            few = None if whole.few is None else whole.few[rows]
            yield rows, whole._replace(x=whole.x[rows], few=few)

    def from_matrix(self, rows: Factors, dtype: torch.dtype) -> Tensor:
        """Logits before softcap and temperature."""
        if rows.weight is None:
            return rows.x
        logits = _product(rows.x.to(self.dtype), rows.weight.T, dtype)
        if rows.bias is not None:
            logits.add_(rows.bias)
        if rows.few is not None and rows.few_weight is not None:
            logits.addmm_(rows.few.to(dtype), rows.few_weight.to(dtype).T)
        return logits

    def chunk(self, rows: Factors) -> LogitsChunk:
        logits, capped = self.from_matrix(rows, self.precise), None
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

    @property
    def whole_logits(self) -> Tensor:
        assert self.logits is not None
        return self.logits

    def log_sum_exp(self) -> Tensor:
        return self.whole_logits.amax(-1).to(self.log_probs.dtype) - self.log_probs.amax(-1)


class Gradients:
    """Of those factors that are `needed`, chunk after chunk. Those of weights are added up in
    float32 or better."""

    def __init__(self, head: Head, factors: Factors, needed: Sequence[bool]) -> None:
        self._head = head
        parts: list[Tensor | None] = []
        for name, x, is_needed in zip(Factors._fields, factors, needed, strict=True):
            if x is None or not is_needed:
                parts.append(None)
            elif name in ("x", "few"):  # of rows
                parts.append(torch.empty_like(x))
            else:
                parts.append(torch.zeros_like(x, dtype=head.precise))
        self.parts = tuple(parts)

    def add(self, rows: slice, of_rows: Factors, grad_NV: Tensor) -> None:
        """Of the logits of some rows."""
        (x_NH, weight_VH, _, x_NR, weight_VR), dtype = of_rows, self._head.dtype
        of_x, of_weight, of_bias, of_few, of_few_weight = self.parts
        if of_bias is not None:
            of_bias.add_(grad_NV.sum(0, dtype=of_bias.dtype))
        if of_few is not None and weight_VR is not None:
            of_few[rows] = (grad_NV @ weight_VR.to(grad_NV.dtype)).to(of_few.dtype)
        if of_few_weight is not None and x_NR is not None:
            of_few_weight.addmm_(grad_NV.T, x_NR.to(grad_NV.dtype))
        if weight_VH is None:
            if of_x is not None:
                of_x[rows] = grad_NV
            return
        low = grad_NV.to(dtype)
        if of_weight is not None:
            if _multiplies_into_float32(low):
                torch.addmm(
                    of_weight, low.T, x_NH.to(dtype), out_dtype=torch.float32, out=of_weight
                )
            else:
                of_weight.addmm_(grad_NV.T, x_NH.to(grad_NV.dtype))
        if of_x is not None:
            of_x[rows] = low @ weight_VH


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.dtype != dtype and _multiplies_into_float32(a):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _multiplies_into_float32(x: Tensor) -> bool:
    """Of 16 bits: kernels that add up in float32 anyway, and need not round the result."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
