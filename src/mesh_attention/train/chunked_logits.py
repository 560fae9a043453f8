"""Logits of a chunk of tokens at a time, and the gradient of what they are made of.

Logits are the largest tensors of training: 32 GiB in float32 for 65,536 tokens and a vocabulary of
131,072. Nothing here holds more than two such tensors, of one chunk, in either pass. The users are
`loss_kernels.py` (cross-entropy) and `policy.py` (log-probabilities).

In names and comments: N tokens, H the width of hidden states, V the vocabulary, R the columns of a
low-rank product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError

_CHUNK_BYTES = 2**30  # of logits that are computed: with less, adding up dW (V x H) takes over
# Logits that the caller gives are cut into _PARTS, so that two chunks in float32 are little beside
# them, but never into chunks of less than _FEWEST or more than _MOST logits.
_PARTS, _FEWEST, _MOST = 16, 2**18, 2**25


class Factors(NamedTuple):
    """What logits are made of: `x @ weight.T + bias + few @ few_weight.T`. The last product is of
    few columns, as that of LoRA. Without a weight, `x` holds the logits."""

    x: Tensor  # (N, H), or (N, V)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)
    few: Tensor | None = None  # (N, R)
    few_weight: Tensor | None = None  # (V, R)


@dataclass(frozen=True)
class Head:
    """How logits are made of `Factors`: the products, then `softcap`, then divided by
    `temperature`.

    dtype         of the large product, as autocast says. Sums, and products of few columns, have
                  the dtype `precise`: float32 or wider
    chunk_tokens  None: `chunks` chooses by memory
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
        """Yields the rows of each chunk, and the factors of their logits. `logit_bytes`: memory
        that the caller needs for each logit of a chunk; None: that of logits and
        log-probabilities."""
        size, (tokens, columns) = self.chunk_tokens, whole.x.shape
        if whole.weight is not None:
            logit_bytes = logit_bytes or 2 * self.precise.itemsize
            size = size or _CHUNK_BYTES // (logit_bytes * len(whole.weight))
            whole = whole._replace(weight=whole.weight.to(self.dtype))
        elif size is None:
            size = max(min(tokens // _PARTS, _MOST // columns), _FEWEST // columns)
        size = max(size, 1)
        for at in range(0, tokens, size):
            rows = slice(at, at + size)
            few = None if whole.few is None else whole.few[rows]
            yield rows, whole._replace(x=whole.x[rows], few=few)

    def products(self, rows: Factors, dtype: torch.dtype) -> Tensor:
        """Logits of some rows before softcap and temperature."""
        if rows.weight is None:
            return rows.x
        a, b = rows.x.to(self.dtype), rows.weight.T
        if dtype != self.dtype and _multiplies_into_float32(a):
            logits = torch.mm(a, b, out_dtype=dtype)
        else:
            logits = (a @ b).to(dtype)
        if rows.bias is not None:
            logits.add_(rows.bias)
        if rows.few is not None and rows.few_weight is not None:
            logits.addmm_(rows.few.to(dtype), rows.few_weight.to(dtype).T)
        return logits

    def chunk(self, rows: Factors) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits, log-probabilities, and what softcap gave, which `before_softcap` takes. Callers
        delete each of the large tensors as soon as they need it no more."""
        logits, capped = self.products(rows, self.precise), None
        if self.softcap is not None:
            logits = capped = logits.to(self.precise).div(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            logits = logits.to(self.precise) / self.temperature
        return logits, torch.log_softmax(logits, -1, dtype=self.precise), capped

    def before_softcap(self, capped: Tensor | None, grad_NV: Tensor) -> Tensor:
        """From the gradient of logits that of `products`, in the same memory. Changes `capped`."""
        if self.temperature != 1:
            grad_NV.div_(self.temperature)
        if capped is not None and self.softcap is not None:
            grad_NV.mul_(capped.div_(self.softcap).square_().neg_().add_(1))
        return grad_NV


class Gradients:
    """Gradients of the `needed` factors, a chunk at a time: `parts`, in the order of `Factors`.
    Those of weights are sums over chunks, in float32 or wider."""

    def __init__(self, head: Head, factors: Factors, needed: Sequence[bool]) -> None:
        self._dtype = head.dtype
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
        """`grad_NV`: the gradient of `Head.products` of these rows."""
        x_NH, weight_VH, _, x_NR, weight_VR = of_rows
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
        low = grad_NV.to(self._dtype)
        if of_weight is not None and _multiplies_into_float32(low):
            x = x_NH.to(self._dtype)
            torch.addmm(of_weight, low.T, x, out_dtype=torch.float32, out=of_weight)
        elif of_weight is not None:
            of_weight.addmm_(grad_NV.T, x_NH.to(grad_NV.dtype))
        if of_x is not None:
            of_x[rows] = low @ weight_VH


class Targets(NamedTuple):
    """The target of each token (0 where there is none), where there is none, and how logits are
    made."""

    tokens: Tensor  # (N,)
    ignored: Tensor  # (N,), bool
    head: Head


def add_at(x_NV: Tensor, tokens: Tensor, values: Tensor) -> None:
    """`x[n, tokens[n]] += values[n]`. `scatter_add_` is refused where algorithms must be
    deterministic."""
    rows = torch.arange(len(tokens), device=tokens.device)
    x_NV[rows, tokens] = x_NV[rows, tokens] + values


def refuse_second_derivatives() -> None:
    """For the backward pass of a chunked loss: PyTorch records gradients in it only for
    create_graph=True."""
    if torch.is_grad_enabled():
        raise MeshAttentionError(
            "second derivatives of chunked losses are not supported; call with create_graph=False, "
            "or take torch.nn.functional.cross_entropy of whole logits"
        )


def _multiplies_into_float32(x: Tensor) -> bool:
    """Whether kernels can give products of 16-bit tensors in float32, in which they sum anyway."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
