"""Launches of GPU kernels that cost the host little when a call of the same kind comes again.

`KernelLaunch` launches our Triton kernels: all of a launch but its tensors is made once, for sizes,
strides and alignments of those. `WrittenLaunch` launches kernels of cuDNN Frontend, which looks at
every tensor, plan and option before each launch; that takes the host longer than a small call takes
the device. What it then hands to its kernels depends on shapes and strides only, but for the
tensors themselves: it is written down once, and handed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
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
        self._numbers = (*numbers, block, tile.rows, tile.keys, self.described)
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages}
        layouts = [(x.at, x.descriptor_at, *_layout(x.tensor)) for x in inner]
        self._layouts = layouts if self.described else []
        self._inner_rows = inner_rows
        self._compiled: Any = None

    def __call__(self, *tensors: Any) -> None:
        """`tensors`: all that the kernel takes before numbers, with None for each descriptor."""
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


class WrittenLaunch:
    """Kernels launched without the checks that their library makes every time.

    The first launch is made by `execute` of the library, and its kernels are replaced meanwhile by
    functions that write down their arguments. Later launches call the kernels with what was written
    down: the tensors of the call in their places, pieces of a new workspace, and constants."""

    def __init__(
        self, compiled: Any, execute: Callable[..., None], tensors: tuple[Tensor, ...]
    ) -> None:
        self._bytes: int = compiled.workspace_size
        # Each argument must be told from the others by its address.
        if len({x.data_ptr() for x in tensors}) < len(tensors):
            tensors = tuple(
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in tensors
            )
        workspace = self._workspace(tensors[0])
        known = {x.data_ptr(): at for at, x in enumerate(tensors)}
        self._calls: list[tuple[Any, list[_Argument]]] = []

        def written_down(kernel: Any) -> Any:
            def call(*arguments: Any) -> None:
                written = [_Argument.of(x, known, workspace) for x in arguments]
                self._calls.append((kernel, written))
                kernel(*arguments)

            return call

        kernels = compiled._compiled_kernel
        if callable(kernels):
            compiled._compiled_kernel = written_down(kernels)
        else:
            names = ("preprocess", "main", "post_dq", "post_dk", "post_dv")
            spied = {n: written_down(k) for n in names if (k := getattr(kernels, n)) is not None}
            compiled._compiled_kernel = replace(kernels, **spied)
        execute(*tensors, workspace=workspace)
        compiled._compiled_kernel = kernels
        own = {a.offset: a for _, call in self._calls for a in call if a.offset is not None}
        # Those that are added to, or counted in, begin at zero; the others are written first.
        written = {a.offset for a in self._calls[0][1]} if len(self._calls) > 1 else set()
        self._pieces = [(a, at not in written) for at, a in own.items()]

    def begin_with(self, kernel: Callable[..., None]) -> None:
        """In place of the first kernel, with the same arguments, which need only suit this one."""
        self._calls[0] = kernel, self._calls[0][1]

    def leave(self, sms: int) -> None:
        """The forward kernel is persistent: it holds as many multiprocessors as it is told of."""
        if sms:
            count = torch.cuda.get_device_properties().multi_processor_count
            ((_, arguments),) = self._calls
            assert arguments[-1].constant == count, "not the kernel that this was written for"
            arguments[-1] = _Argument(constant=count - sms)

    def _workspace(self, like: Tensor) -> Tensor:
        return like.new_empty(self._bytes, dtype=torch.uint8)

    def __call__(self, *tensors: Tensor) -> None:
        workspace = self._workspace(tensors[0])
        own: dict[int | None, Tensor] = {}
        for piece, zeroed in self._pieces:
            own[piece.offset] = x = piece.view(workspace)
            if zeroed:
                x.zero_()
        for kernel, arguments in self._calls:
            kernel(
                *(
                    tensors[a.place]
                    if a.place is not None
                    else a.constant
                    if a.offset is None
                    else own[a.offset]
                    for a in arguments
                )
            )


@dataclass(frozen=True)
class _Argument:
    """One of the tensors of a call, by its place; a piece of the workspace; or what never changes:
    numbers, and tensors of the mask's plan."""

    constant: Any = None
    place: int | None = None
    offset: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8

    @staticmethod
    def of(x: Any, known: Mapping[int, int], workspace: Tensor) -> _Argument:
        if not isinstance(x, Tensor):
            return _Argument(constant=x)
        place = known.get(x.data_ptr())
        if place is not None:
            return _Argument(place=place)
        offset = x.data_ptr() - workspace.data_ptr()
        if 0 <= offset < workspace.numel():
            return _Argument(offset=offset, shape=tuple(x.shape), dtype=x.dtype)
        return _Argument(constant=x)

    def view(self, workspace: Tensor) -> Tensor:
        assert self.offset is not None
        stop = self.offset + math.prod(self.shape) * self.dtype.itemsize
        return workspace[self.offset : stop].view(self.dtype).view(self.shape)
