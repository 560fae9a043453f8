"""Launches that are written down: checks run once, and kernels get the right tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.launches import WrittenLaunch


@dataclass(frozen=True)
class Bundle:
    """Kernels in a row, as a backward pass of cuDNN Frontend has them."""

    preprocess: Callable[..., None]
    main: Callable[..., None]
    post_dq: Callable[..., None]
    post_dk: None = None
    post_dv: None = None


class Compiled:
    """Adds x to what `main` adds up in the workspace, doubled by `preprocess` into another part."""

    def __init__(self) -> None:
        self.workspace_size = 512
        self.checks = 0
        self._compiled_kernel: Any = Bundle(preprocess, main, post)

    def execute(self, x: Tensor, y: Tensor, target: Tensor, *, workspace: Tensor) -> None:
        self.checks += 1
        doubled = workspace[:256].view(torch.float32)[: x.numel()]
        total = workspace[256:].view(torch.float32)[: x.numel()]
        total.zero_()
        kernels = self._compiled_kernel
        kernels.preprocess(x, doubled)
        kernels.main(doubled, y, total, 3.0)
        kernels.post_dq(total, target)


def preprocess(x: Tensor, doubled: Tensor) -> None:
    doubled.copy_(2 * x)


def main(doubled: Tensor, y: Tensor, total: Tensor, factor: float) -> None:
    total += factor * doubled + y


def post(total: Tensor, target: Tensor) -> None:
    target.copy_(total)


def test_later_launches_take_their_own_tensors_and_zeros() -> None:
    compiled = Compiled()
    first = [torch.ones(8), torch.zeros(8), torch.empty(8)]
    launch = WrittenLaunch(compiled, compiled.execute, tuple(first))
    for scale in (1.0, 5.0, 7.0):
        x, y, target = torch.full((8,), scale), torch.arange(8.0), torch.full((8,), torch.nan)
        launch(x, y, target)
        assert torch.equal(target, 6 * x + y)
    assert compiled.checks == 1
    assert isinstance(compiled._compiled_kernel, Bundle)
    assert compiled._compiled_kernel.main is main  # the library's own, as before


def test_the_same_tensor_twice_is_told_apart() -> None:
    """Keys and values may be one tensor in the first call, and two in the next."""
    compiled = Compiled()
    same = torch.ones(8)
    launch = WrittenLaunch(compiled, compiled.execute, (same, same, torch.empty(8)))
    x, y, target = torch.full((8,), 2.0), torch.full((8,), 5.0), torch.empty(8)
    launch(x, y, target)
    assert torch.equal(target, torch.full((8,), 17.0))


def test_another_kernel_in_place_of_the_first_has_its_arguments() -> None:
    compiled = Compiled()
    launch = WrittenLaunch(compiled, compiled.execute, tuple(torch.ones(3, 8)))
    launch.begin_with(lambda x, doubled: doubled.copy_(4 * x.sum()))
    x, y, target = torch.ones(1), torch.full((8,), 5.0), torch.empty(8)
    launch(x, y, target)  # x as no other kernel would take it
    assert torch.equal(target, torch.full((8,), 17.0))
