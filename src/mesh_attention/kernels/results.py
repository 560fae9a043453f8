"""What a kernel returned, held against what `Kernel` promises: mistakes of a new kernel, by name.

Wrong shapes would be spread over the rows by broadcasting, and a log-sum-exp in half precision
makes a merge wrong without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import Block, Kernel
from mesh_attention.kernels.rows import accumulator_dtype


class KernelResultError(MeshAttentionError):
    """A kernel did not return what it is to return."""


def check_forward(kernel: Kernel, block: Block, result: Any) -> None:
    q, v = block.q, block.v
    B, S, H, _ = q.shape
    wanted = {"out": (B, S, H, v.shape[3]), "lse": (B, H, S)}
    _check(kernel, "forward", block, result, wanted)


def check_backward(kernel: Kernel, block: Block, result: Any) -> None:
    wanted = {"dq": block.q.shape, "dk": block.k.shape, "dv": block.v.shape}
    _check(kernel, "backward", block, result, wanted)


def _check(
    kernel: Kernel, method: str, block: Block, result: Any, wanted: Mapping[str, Sequence[int]]
) -> None:
    if (
        isinstance(result, tuple)
        and len(result) == len(wanted)
        and all(map(_is_right, result, wanted.values(), wanted, repeat(block.q)))
    ):
        return
    given, device = block.q.dtype, block.q.device
    widest = {accumulator_dtype(given), torch.float64}
    expected = ", ".join(f"{name} {tuple(shape)}" for name, shape in wanted.items())
    told = (
        f"kernel {kernel.name!r}: {method} of a block with q {tuple(block.q.shape)}, "
        f"k {tuple(block.k.shape)}, v {tuple(block.v.shape)} in {given} must return ({expected})"
    )
    if not isinstance(result, tuple | list) or len(result) != len(wanted):
        raise KernelResultError(f"{told}, not {_described(result)}")
    for (name, shape), x in zip(wanted.items(), result, strict=True):
        if not isinstance(x, Tensor) or x.shape != shape or x.device != device:
            raise KernelResultError(f"{told} on {device}; its {name} is {_described(x)}")
        dtypes = widest if name == "lse" else {given, *widest}
        if x.dtype not in dtypes:
            known = " or ".join(sorted(map(str, dtypes)))
            raise KernelResultError(f"{told}; its {name} is {x.dtype}, and must be {known}")


def _is_right(x: Any, shape: Sequence[int], name: str, q: Tensor) -> bool:
    """As almost always, and quickly: every result of every call is looked at."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        isinstance(x, Tensor)
        and x.shape == shape
        and (x.dtype == wide or (name != "lse" and x.dtype == q.dtype))
        and x.device == q.device
    )


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {tuple(x.shape)} in {x.dtype} on {x.device}"
    if isinstance(x, tuple | list):
        return f"{len(x)} values ({', '.join(map(_described, x))})"
    return f"{type(x).__name__}"
