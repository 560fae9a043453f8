"""Attention sinks: a learnable logit for each head that takes weight and has no value.

As in gpt-oss, the softmax of a row runs over its scores and one more logit s:

    out' = out * sigmoid(lse - s)        lse' = logaddexp(lse, s)

That is known where a row ends up, at its owner, after everything else: so every kernel and every
method has sinks. With p' = exp(score - lse') the backward pass is the usual one, given out' and
lse'. The sink's own weight is p = exp(s - lse'), and its gradient that of a score whose value is
zero: p * (0 - delta), with delta = rowsum(out' * grad_out), less what a loss on lse' asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from mesh_attention.kernels import choose_rows
from mesh_attention.plan.language.buffers import Buffer, Kind


def add_sinks(out_BSHE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> None:
    """In place, in the precision of `lse`. A row that sees nothing has all its weight on the sink:
    its out is 0 and its lse is s. A sink of -inf is none."""
    sink = sinks_H.to(lse_BHS.dtype)[:, None]
    weight = torch.sigmoid(lse_BHS - sink).masked_fill_(lse_BHS == -torch.inf, 0.0)
    out_BSHE.mul_(weight.transpose(1, 2).unsqueeze(-1))
    lse_BHS.copy_(torch.logaddexp(lse_BHS, sink))


def add_sinks_to_kept(buffers: Iterable[Buffer], kept: Iterable[Tensor], sinks: Tensor) -> None:
    """In place, to the lse that stays for the backward pass, (rows, batch, own heads, 1)."""
    for buffer, lse in zip(buffers, kept, strict=True):
        if buffer.kind is Kind.LSE:
            lse.copy_(torch.logaddexp(lse, sinks[slice(*buffer.heads), None].to(lse.dtype)))


def gradient_of_sinks(
    out_BSHE: Tensor,
    grad_out_BSHE: Tensor,
    lse_BHS: Tensor,
    sinks_H: Tensor,
    grad_lse_BHS: Tensor | None = None,
) -> Tensor:
    """Of these rows alone; `out` and `lse` are those with sinks. A row that sees nothing adds
    nothing through its out, whatever its gradient holds. The last dim of tokens is contiguous."""
    device = out_BSHE.device
    delta = torch.empty_like(lse_BHS, memory_format=torch.contiguous_format)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        choose_rows(device.type, out_BSHE.dtype).rows.delta(out_BSHE, grad_out_BSHE, delta)
    delta.masked_fill_((out_BSHE == 0).all(-1).transpose(1, 2), 0.0)
    if grad_lse_BHS is not None:
        delta -= grad_lse_BHS
    sink = sinks_H.to(lse_BHS.dtype)[:, None]
    weight = torch.exp(sink - lse_BHS).masked_fill_(lse_BHS == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2)).to(sinks_H.dtype)
