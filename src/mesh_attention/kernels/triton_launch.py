"""Launches of our Triton attention kernels that cost little when a call of the same kind comes.

All of a launch but its tensors is made once, for sizes, strides and alignments of those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class KernelTile(NamedTuple):
    """What a program works on at once, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int
    # Whether tiles of whole blocks are loaded by the hardware's own unit for that (TMA, from Hopper
    # on), which takes descriptors of the tensors; layouts that it cannot take never are.
    described: bool = False
    # Whether the next matrix product, in forward that of the next block, is begun before the
    # exponentials of this one.
    ahead: bool = False


class InnerTensor(NamedTuple):
    """A tensor that the inner loop of a kernel reads, by its place among the arguments and by that
    of its descriptor."""

    at: int
    descriptor_at: int
    tensor: Tensor


class KernelLaunch:
    """A kernel, its grid, and all of its arguments but tensors.

    The compiled kernel is always the same, and Triton's own look for that takes longer than the
    rest of a launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[Any, ...],
        block: int,
        tile: KernelTile,
        inner: tuple[InnerTensor, ...],
        inner_rows: int,
    ) -> None:
        """The inner loop reads `inner_rows` of the `inner` tensors at once."""
        self.block = block
        self._kernel = kernel
        self._grid = grid
        self.described = tile.described and all(_can_be_described(x.tensor) for x in inner)
        self._numbers = (*numbers, block, tile.rows, tile.keys, self.described, tile.ahead)
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages}
        layouts = [(x.at, x.descriptor_at, *_layout(x.tensor)) for x in inner]
        self._layouts = layouts if self.described else []
        self._inner_rows = inner_rows
        self._compiled: Any = None

    def __call__(self, *tensors: Any) -> None:
        arguments = list(tensors)
        if self._compiled is not None:
            for at, descriptor_at, shape, strides in self._layouts:
                arguments[descriptor_at] = _Description(tensors[at], shape, strides)
            self._compiled[self._grid](*arguments, *self._numbers)
            return
        for at, descriptor_at, shape, strides in self._layouts:
            from triton.tools.tensor_descriptor import TensorDescriptor

            tile = [1, self._inner_rows, 1, padded(shape[3])]
            arguments[descriptor_at] = TensorDescriptor(tensors[at], shape, strides, tile)
        # The interpreter compiles nothing.
        self._compiled = self._kernel[self._grid](*arguments, *self._numbers, **self._options)


class _Description(NamedTuple):
    """As much of a TensorDescriptor as the launch of a compiled kernel reads, without checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"


def _can_be_described(x: Tensor) -> bool:
    """The hardware reads whole 16 bytes."""
    size = x.element_size()
    whole = all(stride > 0 and stride * size % 16 == 0 for stride in _layout(x)[1][:3])
    return whole and x.data_ptr() % 16 == 0 and x.shape[3] * size >= 16


def _layout(x: Tensor) -> tuple[list[int], list[int]]:
    """(shape, strides); that of a dimension with one element is never used, and may be anything."""
    sizes = zip(x.shape, x.stride(), strict=True)
    strides = [16 if length == 1 else stride for length, stride in sizes]
    return list(x.shape), [*strides[:3], 1]


def padded(width: int) -> int:
    """A power of two, and no less than a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())
