"""NaN in place of results that were made from another call's data, decided on the device.

`runtime/agreement/watch.py` calls this after each call on a GPU. `pair` adds up to zero if all
ranks were at the same call. `status` is host memory that the device reads and writes: the number of
the first wrong call and of the last call that is over, counted from 1. After a wrong call all later
ones are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Poison = Callable[[Tensor, Tensor, int, tuple[Tensor, ...]], None]  # pair, status, place, results


@cache
def poison_kernel() -> Poison:
    try:
        from mesh_attention.kernels.fused.poison import poison_by_one_kernel
    except ImportError:
        return poison_by_torch

    def poison(pair: Tensor, status: Tensor, place: int, results: tuple[Tensor, ...]) -> None:
        if not poison_by_one_kernel(pair, status, place, results):
            poison_by_torch(pair, status, place, results)

    return poison


def poison_by_torch(pair: Tensor, status: Tensor, place: int, results: tuple[Tensor, ...]) -> None:
    """With a pass over the results."""
    first = status[:1].to(pair.device, non_blocking=True)
    first = torch.where(pair.sum(0, keepdim=True).ne(0) & (first == 0), place, first)
    for result in results:
        result.masked_fill_(first.ne(0), _worst_value(result.dtype))
    status[:1].copy_(first, non_blocking=True)
    status[1:].copy_(torch.full_like(first, place), non_blocking=True)


def _worst_value(dtype: torch.dtype) -> float | int | bool:
    """What cannot be taken for a result, as far as a type has such a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min
