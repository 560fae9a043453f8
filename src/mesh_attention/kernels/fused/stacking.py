"""Whether tensors lie in memory at equal distances, so that a kernel can walk over them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["equal_steps"]


def equal_steps(tensors: Sequence[Tensor]) -> int | None:
    """Elements from each tensor to the next, or None if they differ in that or in form."""
    first = tensors[0]
    if len(tensors) == 1:
        return 0
    size = first.element_size()
    step = tensors[1].data_ptr() - first.data_ptr()
    if step % size:
        return None
    before = first
    for x in tensors[1:]:
        if x.data_ptr() - before.data_ptr() != step:
            return None
        if x.dtype != first.dtype or x.stride() != first.stride():
            return None
        before = x
    return step // size
