"""Attention with sinks by its definition in float64: one more column in the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention import Mask
from support.reference import visible

__all__ = ["NAMES", "attention_with_sinks", "distances"]

NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks")


def attention_with_sinks(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor,
    mask: Mask,
    *,
    softcap: float | None = None,
    grad_lse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Of whole q, k, v and the gradient of out, by autograd through a dense softmax."""
    q, k, v, s = leaves = [x.detach().double().requires_grad_() for x in (*tensors[:3], sinks)]
    group = q.shape[2] // k.shape[2]
    shown = visible(mask, q.shape[1], k.shape[1])
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(group, 2))
    scores = scores * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~shown, -torch.inf)
    column = s[None, :, None, None].expand(*scores.shape[:3], 1)
    everything = torch.cat([scores, column], -1)
    weights = everything.softmax(-1)[..., :-1]
    out = torch.einsum("bhst,bthe->bshe", weights, v.repeat_interleave(group, 2))
    lse = everything.logsumexp(-1)
    loss = (out * tensors[3].double()).sum()
    if grad_lse is not None:
        loss = loss + (lse * grad_lse.double()).sum()
    grads = torch.autograd.grad(loss, leaves)
    results = (out, lse, *grads)
    return {name: x.detach() for name, x in zip(NAMES, results, strict=True)}


def distances(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each, in units of its largest value if that exceeds one."""
    assert results.keys() <= truth.keys()
    result = {}
    for name, value in results.items():
        expected = truth[name]
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        error = (value.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        result[name] = torch.inf if error.isnan() else error.item()
    return result
