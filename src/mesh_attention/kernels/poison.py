"""NaN in place of results that were made from another call's data, decided on the device.

`status` is host memory that the device reads and writes: [the first call that is wrong, the last
one compared, the last one finished], by their places, which begin at 1.
Without Triton the same is done by PyTorch, with a pass over the results.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class PoisonKernels(Protocol):
    def compare(self, pair: Tensor, status: Tensor, place: int) -> None:
        """Wrong for good if the two do not add up to zero."""
        ...

    def poison(self, status: Tensor, place: int, results: tuple[Tensor, ...]) -> None:
        """Fill contiguous results with NaN if anything is wrong."""
        ...


@cache
def poison_kernels() -> PoisonKernels:
    try:
        from mesh_attention.kernels.fused.poison import FusedPoison
    except ImportError:
        return TorchPoison()
    return FusedPoison()


class TorchPoison:
    def compare(self, pair: Tensor, status: Tensor, place: int) -> None:
        known = status[:1].to(pair.device, non_blocking=True)
        wrong = pair.sum(0, keepdim=True).ne(0) & (known == 0)
        status[:1].copy_(torch.where(wrong, place, known), non_blocking=True)
        status[1:2].copy_(torch.full_like(known, place), non_blocking=True)

    def poison(self, status: Tensor, place: int, results: tuple[Tensor, ...]) -> None:
        wrong = status[:1].to(results[0].device, non_blocking=True).ne(0)
        for result in results:
            result.masked_fill_(wrong, worst_value(result.dtype))
        status[2:].copy_(torch.full_like(wrong, place, dtype=torch.int64), non_blocking=True)


def worst_value(dtype: torch.dtype) -> float | int | bool:
    """What cannot be taken for a result, as far as a type has such a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min
