"""Work on rows in plain PyTorch, on any device, dtype and shape: the truth beside the fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.kernels.merge import (
    accumulator_dtype,
    delta,
    merge_into,
    merge_lse,
    per_row,
    rescale,
)
from mesh_attention.kernels.surrogate import surrogate_out
from mesh_attention.kernels.unseen import without_unseen

__all__ = ["PlainRows"]


class PlainRows:
    name = "plain"

    def merge_into(
        self, acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor, *, fresh: bool
    ) -> None:
        if not fresh:
            merge_into(acc_out, acc_lse, out, lse)
            return
        acc_lse.copy_(lse)
        acc_out.copy_(out).masked_fill_(per_row(acc_lse == -torch.inf), 0.0)

    def merge_all(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor
    ) -> None:
        if len(outs) == 1:
            out.copy_(outs[0])
            lse.copy_(lses[0])
            return
        # Merged one by one in the accumulator's precision, and rounded once.
        total = torch.empty(out.shape, dtype=lse.dtype, device=out.device)
        for at, (part, part_lse) in enumerate(zip(outs, lses, strict=True)):
            self.merge_into(total, lse, part, part_lse, fresh=at == 0)
        out.copy_(total)

    def merge_lse(self, parts: Sequence[Tensor], target: Tensor) -> None:
        target.copy_(merge_lse(parts))

    def rescale(self, out: Tensor, own: Tensor, everywhere: Tensor, target: Tensor) -> None:
        target.copy_(rescale(out, own, everywhere))

    def sum(self, parts: Sequence[Tensor], target: Tensor) -> None:
        if len(parts) == 1:
            target.copy_(parts[0])
            return
        wide = accumulator_dtype(target.dtype)
        if target is parts[0] and target.dtype == wide:
            total = target
        else:
            total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        if total is not target:
            target.copy_(total)

    def delta(self, out: Tensor, grad_out: Tensor, target: Tensor) -> None:
        target.copy_(delta(out, grad_out))

    def stand_in(self, grad_out: Tensor, delta: Tensor) -> Tensor:
        return surrogate_out(grad_out, delta)

    def finite_lse(self, lse: Tensor) -> Tensor:
        return without_unseen(lse).contiguous()
