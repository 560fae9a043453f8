"""Launches of a library's kernels, written down once and made again without its checks.

cuDNN Frontend looks at every tensor, plan and option before each launch, which takes the host
longer than a small call takes the device. What it then hands to its kernels depends on shapes and
strides only, but for the tensors themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class WrittenLaunch:
    """Kernels launched without the checks that their library makes every time, which take longer
    than a small call: what it hands to each kernel is written down once, and handed again."""

    def __init__(
        self, compiled: Any, execute: Callable[..., None], tensors: tuple[Tensor, ...]
    ) -> None:
        self._bytes: int = compiled.workspace_size
        # Each argument must be told from the others by its address.
        told_apart = {x.data_ptr(): x for x in tensors}
        if len(told_apart) < len(tensors):
            tensors = tuple(
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in tensors
            )
        workspace = self._workspace(tensors[0])
        known = {x.data_ptr(): at for at, x in enumerate(tensors)}
        self._calls: list[tuple[Any, list[_Argument]]] = []

        def written_down(kernel: Any) -> Any:
            def call(*arguments: Any) -> None:
                found = [_Argument.of(x, known, workspace) for x in arguments]
                self._calls.append((kernel, found))
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
