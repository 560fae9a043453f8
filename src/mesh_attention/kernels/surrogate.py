"""A stand-in for the attention output in the backward pass (algorithm.md, section 4).

Flash backward kernels take `out` but use it only through `delta = rowsum(out * grad_out)`.
Where only delta is known, any tensor with the same row sums will do. Two entries a row suffice:
delta / dO where |dO| is largest, and at the second largest the part that rounding lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels.merge import accumulator_dtype, per_row


def surrogate_out(grad_out_BSHE: Tensor, delta_BHS: Tensor) -> Tensor:
    """A tensor like `grad_out` whose row sums with it are `delta`; zeros where dO is zero."""
    dtype = grad_out_BSHE.dtype
    wide = accumulator_dtype(dtype)
    limit = torch.finfo(dtype).max
    surrogate = torch.zeros_like(grad_out_BSHE, memory_format=torch.contiguous_format)
    if grad_out_BSHE.numel() == 0:
        return surrogate
    remainder = per_row(delta_BHS).to(wide)
    magnitude = grad_out_BSHE.abs()
    for _ in range(min(2, grad_out_BSHE.shape[-1])):
        column = magnitude.argmax(dim=-1, keepdim=True)
        divisor = grad_out_BSHE.gather(-1, column).to(wide)
        # A second largest entry near zero may call for more than the dtype holds.
        entry = (remainder / divisor).clamp(-limit, limit).masked_fill(divisor == 0, 0.0).to(dtype)
        surrogate.scatter_(-1, column, entry)
        remainder = remainder - entry.to(wide) * divisor
        magnitude.scatter_(-1, column, -1.0)
    return surrogate
