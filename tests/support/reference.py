"""Attention by its definition in float64, and how far a result is from it.

Visibility is written here a second time, token by token from the words of `Mask`, so that an error
in the row ranges of the library cannot hide itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mesh_attention import Mask

__all__ = ["NAMES", "Attention", "attention", "errors", "tolerance", "visible"]

NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class Attention:
    out: Tensor
    lse: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES}


def visible(mask: Mask, q_tokens: int, kv_tokens: int) -> Tensor:
    """(q_tokens, kv_tokens), true where the query sees the key."""
    seen = torch.zeros(q_tokens, kv_tokens, dtype=torch.bool)
    if mask.slices is not None:
        for (q0, q1), (k0, k1), kind in mask.slices:
            row, key = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
            shown = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
            if kind in ("causal", "bicausal"):  # the last query sees the last key
                shown &= key <= row + (k1 - k0) - (q1 - q0)
            if kind in ("inverse_causal", "bicausal"):  # the first query sees the first key
                shown &= key >= row
            seen[q0:q1, k0:k1] |= shown
        return seen
    q_cuts = mask.documents or (0, q_tokens)
    k_cuts = mask.kv_documents or mask.documents or (0, kv_tokens)
    for (q0, q1), (k0, k1) in zip(pairwise(q_cuts), pairwise(k_cuts), strict=True):
        key = torch.arange(k1 - k0)
        own = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)  # aligned at the end
        shown = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if mask.causal:
            shown &= (key <= own) | (key < mask.prefix)
        left, right = mask.window or (None, None)
        if left is not None:
            shown &= key >= own - left
        if right is not None:
            shown &= key <= own + right
        seen[q0:q1, k0:k1] = shown
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    mask: Mask | Tensor,
    scale: float | None = None,
) -> Attention:
    """Of whole (batch, tokens, heads, width) tensors; a query that sees no key gives 0 and -inf."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    shown = visible(mask, q.shape[1], k.shape[1]) if isinstance(mask, Mask) else mask
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(group, 2)) * scale
    scores = scores.masked_fill(~shown, -torch.inf)
    lse = scores.logsumexp(-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.where(shown, (scores - safe[..., None]).exp(), 0.0)
    out = torch.einsum("bhst,bthd->bshd", weights, v.repeat_interleave(group, 2))
    grads = torch.autograd.grad(out, (q, k, v), grad_out.double())
    return Attention(out.detach(), lse.detach(), *grads)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]


def errors(results: dict[str, Tensor], truth: Attention) -> dict[str, float]:
    """Largest difference of each tensor, in units of its largest value if that exceeds one.

    Infinite where one of them is NaN, or where they disagree on which entries are infinite.
    """
    result = {}
    for name, value in results.items():
        expected = truth.named()[name]
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        value = value.double()
        finite = ~expected.isinf()
        if not torch.equal(value[~finite], expected[~finite]) or not value[finite].isfinite().all():
            result[name] = torch.inf
        elif finite.any():
            largest = max(1.0, expected[finite].abs().max().item())
            result[name] = (value - expected)[finite].abs().max().item() / largest
        else:
            result[name] = 0.0
    return result
