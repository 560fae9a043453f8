"""Work on rows between the attention calls: merging, adding, rescaling, and inputs of backward.

`RowKernels` does it in plain PyTorch, on any device, dtype and shape, and is the reference;
`fused.rows.FusedRows` has a Triton kernel for each method, on CUDA. `registry.choose_rows` chooses.

Partial results are merged by their log-sum-exp (algorithm.md, section 4). A partial result is a
weighted mean of values (`out`) and the logarithm of its total weight (`lse`); a row that has seen
no key has lse = -inf, and its `out` is ignored. Every formula here subtracts the larger exponent
first, so differences of 1e4 and -inf on either side give no NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

# exp(score - this) is zero for every score, and unlike inf it cannot meet another infinity.
UNSEEN_LSE = 1e30


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def delta(out_BSHE: Tensor, grad_out_BSHE: Tensor) -> Tensor:
    """`rowsum(out * grad_out)` as (B, H, S): the backward pass needs no more of the output."""
    dtype = accumulator_dtype(out_BSHE.dtype)
    return (out_BSHE.to(dtype) * grad_out_BSHE.to(dtype)).sum(dim=-1).transpose(1, 2).contiguous()


class RowKernels:
    """Tokens are (B, S, H, E), statistics (B, H, S), both strided views."""

    name = "plain"

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        """Merge a partial result into the accumulators; `fresh` ones hold nothing yet."""
        if fresh:
            acc_lse.copy_(lse)
            _clear(acc_out.copy_(out), acc_lse == -torch.inf)
            return
        lse = lse.to(acc_lse.dtype)
        # Weights from the difference, not from the merged value: they add up to one even
        # where the log-sum-exp is so large that adding to it is lost in rounding.
        advantage = lse - acc_lse
        advantage.masked_fill_(advantage.isnan(), 0.0)  # both -inf
        new_weight, old_weight = advantage.sigmoid(), advantage.neg().sigmoid()
        # Rows without weight are cleared, not multiplied by zero: 0 * NaN is NaN.
        acc_out.masked_fill_(_per_row(acc_lse == -torch.inf), 0.0).mul_(_per_row(old_weight))
        new_out = out.to(acc_out.dtype).masked_fill(_per_row(lse == -torch.inf), 0.0)
        acc_out.addcmul_(new_out, _per_row(new_weight).to(acc_out.dtype))
        acc_lse.copy_(torch.logaddexp(acc_lse, lse))

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        """The softmax merge of at least one partial result, rounded once."""
        if len(outs) == 1:
            out.copy_(outs[0])
            lse.copy_(lses[0])
            return
        parts_PBHS = torch.stack([part.to(lse.dtype) for part in lses])
        unseen_PBHS = parts_PBHS == -torch.inf
        # Softmax subtracts the largest, so weights add up to one even where adding to a log-sum-exp
        # is lost in rounding. They are NaN in rows where no part has seen a key.
        weights_PBHS = parts_PBHS.softmax(0)
        if out.is_cuda or bool(unseen_PBHS.any()):
            weights_PBHS.masked_fill_(unseen_PBHS, 0.0)
            # Rows without weight are cleared, not multiplied by zero: 0 * NaN is NaN.
            hidden = _per_row(unseen_PBHS)
            outs = [part.masked_fill(rows, 0.0) for part, rows in zip(outs, hidden, strict=True)]
        first_weight, *weights = _per_row(weights_PBHS).unbind()
        total = outs[0].to(lse.dtype) * first_weight
        for part, weight in zip(outs[1:], weights, strict=True):
            total.addcmul_(part.to(lse.dtype), weight)
        out.copy_(total)
        lse.copy_(reduce(torch.logaddexp, parts_PBHS.unbind()))

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """The log-sum-exp of the whole, from the log-sum-exps of at least one part."""
        dtype = accumulator_dtype(parts[0].dtype)
        target.copy_(torch.logsumexp(torch.stack([lse.to(dtype) for lse in parts]), dim=0))

    def rescale(self, out: Tensor, partial_lse: Tensor, global_lse: Tensor, target: Tensor) -> None:
        """A part times its weight in the whole, so that a plain sum of parts is the output."""
        dtype = accumulator_dtype(out.dtype)
        unseen = partial_lse == -torch.inf
        weight = torch.exp((partial_lse - global_lse).masked_fill(unseen, -torch.inf))
        seen_out = out.to(dtype).masked_fill(_per_row(unseen), 0.0)
        target.copy_(seen_out * _per_row(weight).to(dtype))

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        """At least one part, added in wide precision and rounded once; the target may be a part."""
        if len(parts) == 1:
            target.copy_(parts[0])
            return
        wide = accumulator_dtype(target.dtype)
        if len(parts) == 2 and target.dtype == wide:
            torch.add(parts[0].to(wide), parts[1], out=target)
            return
        if target is parts[0] and target.dtype == wide:
            total = target
        else:
            total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        if total is not target:
            target.copy_(total)

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None:
        products = out.to(target.dtype) * grad_out.to(target.dtype)
        target.copy_(products.sum(dim=-1).transpose(1, 2))

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        """A contiguous `out` whose row sums with `grad_out` are `delta` (algorithm.md, section 4):
        flash backward kernels take `out` but use it only through those sums.

        Two entries a row suffice: delta / dO where |dO| is largest, and at the second largest
        the part that rounding lost, if the first was rounded. Zeros where dO is zero.
        """
        dtype = grad_out.dtype
        wide = accumulator_dtype(dtype)
        limit = torch.finfo(dtype).max
        out = torch.zeros_like(grad_out, memory_format=torch.contiguous_format)
        if grad_out.numel() == 0:
            return out
        remainder = _per_row(delta).to(wide)
        magnitude = grad_out.abs()
        columns = 1 if dtype == wide else min(2, grad_out.shape[-1])
        for to_come in reversed(range(columns)):
            column = magnitude.argmax(dim=-1, keepdim=True)
            divisor = grad_out.gather(-1, column).to(wide)
            # A second largest entry near zero may call for more than the dtype holds.
            entry = (remainder / divisor).clamp(-limit, limit)
            entry = entry.masked_fill(divisor == 0, 0.0).to(dtype)
            out.scatter_(-1, column, entry)
            if to_come:
                remainder = remainder - entry.to(wide) * divisor
                magnitude.scatter_(-1, column, -1.0)
        return out

    def finite_lse(self, lse: Tensor) -> Tensor:
        """A contiguous copy with `UNSEEN_LSE` in rows that see no key, where -inf would make
        exp(score - lse) infinite."""
        return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=UNSEEN_LSE).contiguous()


def _clear(x: Tensor, rows_BHS: Tensor) -> None:
    """In place. On a CPU we look first whether there are such rows; mostly there are none."""
    if x.is_cuda or bool(rows_BHS.any()):
        x.masked_fill_(_per_row(rows_BHS), 0.0)


def _per_row(x_BHS: Tensor) -> Tensor:
    """(B, S, H, 1), to broadcast over an output; likewise of several outputs."""
    return x_BHS.transpose(-2, -1).unsqueeze(-1)
