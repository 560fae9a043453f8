"""Joining partial attention results by their log-sum-exp (algorithm.md, section 4).

A partial result is a weighted mean of values (`out`) and the logarithm of its total weight
(`lse`); a row that has seen no key has lse = -inf and its `out` is ignored. Every formula here
subtracts the larger exponent first, so differences of 1e4 and -inf on either side give no NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_into(
    acc_out_BSHE: Tensor, acc_lse_BHS: Tensor, out_BSHE: Tensor, lse_BHS: Tensor
) -> None:
    """Merge (out, lse) into the fp32 or fp64 accumulators, in place.

    Start from `acc_lse` full of -inf; `acc_out` may then hold anything, NaN too.
    """
    lse_BHS = lse_BHS.to(acc_lse_BHS.dtype)
    # Weights from the difference, not from the merged value: they add up to one even
    # where the log-sum-exp is so large that adding to it is lost in rounding.
    advantage_BHS = lse_BHS - acc_lse_BHS
    advantage_BHS.masked_fill_(advantage_BHS.isnan(), 0.0)  # both -inf
    new_weight, old_weight = advantage_BHS.sigmoid(), advantage_BHS.neg().sigmoid()
    # Rows without weight are cleared, not multiplied by zero: 0 * NaN is NaN.
    acc_out_BSHE.masked_fill_(per_row(acc_lse_BHS == -torch.inf), 0.0).mul_(per_row(old_weight))
    new_out = out_BSHE.to(acc_out_BSHE.dtype).masked_fill(per_row(lse_BHS == -torch.inf), 0.0)
    acc_out_BSHE.addcmul_(new_out, per_row(new_weight).to(acc_out_BSHE.dtype))
    acc_lse_BHS.copy_(torch.logaddexp(acc_lse_BHS, lse_BHS))


def merge_lse(partial_BHS: Sequence[Tensor]) -> Tensor:
    """The log-sum-exp of the whole, from those of its parts."""
    dtype = accumulator_dtype(partial_BHS[0].dtype)
    return torch.logsumexp(torch.stack([lse.to(dtype) for lse in partial_BHS]), dim=0)


def rescale(out_BSHE: Tensor, lse_partial_BHS: Tensor, lse_global_BHS: Tensor) -> Tensor:
    """`out * exp(lse_partial - lse_global)`: partials so rescaled add up to the whole output."""
    dtype = accumulator_dtype(out_BSHE.dtype)
    unseen_BHS = lse_partial_BHS == -torch.inf
    weight_BHS = torch.exp((lse_partial_BHS - lse_global_BHS).masked_fill(unseen_BHS, -torch.inf))
    return out_BSHE.to(dtype).masked_fill(per_row(unseen_BHS), 0.0) * per_row(weight_BHS).to(dtype)


def delta(out_BSHE: Tensor, grad_out_BSHE: Tensor) -> Tensor:
    """(B, H, S): all that the backward pass needs of the output, `rowsum(out * grad_out)`."""
    dtype = accumulator_dtype(out_BSHE.dtype)
    return (out_BSHE.to(dtype) * grad_out_BSHE.to(dtype)).sum(dim=-1).transpose(1, 2).contiguous()


def per_row(x_BHS: Tensor) -> Tensor:
    """(B, S, H, 1), to broadcast over an output."""
    return x_BHS.transpose(1, 2).unsqueeze(-1)
