"""Blocks to try kernels on, the truth about them, and how far off a kernel may be.

Inputs are drawn in float64 and rounded to the dtype under test; the truth is the float64
reference on the rounded inputs, so that what is measured is the kernel's error alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mesh_attention.kernels import (
    BackwardInputs,
    BlockMask,
    Causal,
    Full,
    Kernel,
    Request,
    RowRange,
    kind_of,
)
from mesh_attention.kernels import Block as KernelBlock
from mesh_attention.kernels.reference import Reference
from mesh_attention.kernels.rows import RowKernels, delta
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.execute.kernel_calls import Preparation

MaskMaker = Callable[[int, int], BlockMask]


@dataclass(frozen=True)
class Shape:
    S: int
    T: int
    H: int = 4
    G: int = 4
    D: int = 16
    E: int = 16
    B: int = 2


@dataclass(frozen=True)
class Block:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    mask: BlockMask
    scale: float

    def request(self, direction: Direction = Direction.BACKWARD) -> Request:
        device = self.q.device
        return Request(
            direction=direction,
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=self.q.dtype,
            head_dim=self.q.shape[3],
            v_head_dim=self.v.shape[3],
            num_heads=self.q.shape[2],
            num_kv_heads=self.k.shape[2],
            mask=kind_of(self.mask),
            intervals=self.mask.num_intervals if isinstance(self.mask, RowRange) else 1,
        )

    def of_kernel(self, mask: BlockMask | None = None, scale: float | None = None) -> KernelBlock:
        scale = self.scale if scale is None else scale
        return KernelBlock(self.q, self.k, self.v, mask or self.mask, scale)

    def to(self, dtype: torch.dtype) -> Block:
        parts = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "grad_out")}
        return replace(self, **parts)

    def keys(self, part: slice, mask: BlockMask) -> Block:
        return replace(self, k=self.k[:, part], v=self.v[:, part], mask=mask)


@dataclass(frozen=True)
class Result:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("out", "lse", "dq", "dk", "dv")}


def full(num_queries: int, num_keys: int) -> BlockMask:
    return Full()


def causal(num_queries: int, num_keys: int) -> BlockMask:
    return Causal()


def window(num_queries: int, num_keys: int) -> BlockMask:
    row = torch.arange(num_queries)
    return RowRange((row - 9).clamp(min=0), row + 1, torch.arange(num_keys))


def documents(num_queries: int, num_keys: int) -> BlockMask:
    row = torch.arange(num_queries)
    start = row // 13 * 13
    return RowRange(start, row + 1, torch.arange(num_keys))


def striped(num_queries: int, num_keys: int) -> BlockMask:
    """Queries of stripe 1 of 3, keys of two stripes one after the other: not sorted."""
    key_position = torch.cat(
        [torch.arange(0, 3 * ((num_keys + 1) // 2), 3), torch.arange(2, 3 * (num_keys // 2), 3)]
    )
    row = torch.arange(num_queries)
    return RowRange(torch.zeros_like(row), 3 * row + 2, key_position)


def scattered(num_queries: int, num_keys: int) -> BlockMask:
    """Shuffled keys, and rows whose range is empty, inverted or outside all keys."""
    generator = torch.Generator().manual_seed(5)
    lo = torch.randint(0, 2 * num_keys, (num_queries,), generator=generator)
    hi = lo + torch.randint(-3, num_keys, (num_queries,), generator=generator)
    return RowRange(lo, hi, torch.randperm(num_keys, generator=generator))


def union(num_queries: int, num_keys: int) -> BlockMask:
    """First keys, keys about a third of the way and a window: one, two or three intervals, and of
    some rows none. The last sixth of the keys comes first."""
    row = torch.arange(num_queries) * num_keys // num_queries
    first = torch.stack((torch.zeros_like(row), row.clamp(max=3) + 1))
    middle = torch.stack((first[1] + num_keys // 6, first[1] + num_keys // 3))
    middle[:, row % 5 == 2] = 0
    last = torch.stack(((row - 7).clamp(min=0), row + 1))
    last[0] = torch.maximum(last[0], torch.maximum(first[1], middle[1]))
    ends = torch.stack((first, middle, last))
    ends[:, :, row % 7 == 3] = 0
    empty = ends[:, 1] <= ends[:, 0]
    ends = ends.masked_fill(empty[:, None], 0)
    order = empty.int().argsort(dim=0, stable=True)  # those that a row does not have come last
    lo, hi = (ends[:, side].gather(0, order) for side in (0, 1))
    return RowRange(lo, hi, torch.arange(num_keys).roll(num_keys // 6))


RANGES: tuple[MaskMaker, ...] = (window, documents, striped, scattered, union)


def make_block(
    shape: Shape,
    dtype: torch.dtype,
    mask: MaskMaker = full,
    *,
    device: str = "cpu",
    strided: bool = False,
    seed: int = 0,
) -> Block:
    torch.set_num_threads(1)  # the blocks are small, and tests run side by side
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int, dim: int) -> Tensor:
        x = torch.randn(shape.B, length, heads, dim, generator=generator, dtype=torch.float64)
        x = x.to(device, dtype)
        if not strided:
            return x
        # A view into the middle of a bigger buffer, whose rest is poison.
        buffer = x.new_full((shape.B, length + 5, heads + 2, dim), torch.nan)
        view = buffer[:, 3 : 3 + length, 1 : 1 + heads]
        view.copy_(x)
        return view

    return Block(
        q=draw(shape.S, shape.H, shape.D),
        k=draw(shape.T, shape.G, shape.D),
        v=draw(shape.T, shape.G, shape.E),
        grad_out=draw(shape.S, shape.H, shape.E),
        mask=mask(shape.S, shape.T),
        scale=shape.D**-0.5,
    )


def backward(
    kernel: Kernel,
    block: KernelBlock,
    grad_out: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of a block by itself, given what its kernel declares to need."""
    assert kernel.backward_needs is not None
    wanted = [(kernel.backward_needs, (0, grad_out.shape[1]))]
    whole = BackwardInputs(grad_out, out, lse, delta)
    (inputs,) = Preparation(RowKernels(), wanted, whole).make()
    return kernel.backward(block, inputs)


def run(kernel: Kernel, block: Block, *, delta_only: bool = False) -> Result:
    """Forward and backward of a block that is the whole softmax."""
    for direction in Direction:
        reason = kernel.refuses(block.request(direction))
        assert reason is None, f"{kernel.name} refused: {reason}"
    out, lse = kernel.forward(block.of_kernel())
    dq, dk, dv = backward(
        kernel,
        block.of_kernel(),
        block.grad_out,
        None if delta_only else out,
        lse,
        delta(out, block.grad_out) if delta_only else None,
    )
    return Result(out, lse, dq, dk, dv)


def truth(block: Block) -> Result:
    return run(Reference(), block.to(torch.float64))


TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


def error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry; infinities must agree exactly."""
    assert result.shape == expected.shape, (result.shape, expected.shape)
    if result.numel() == 0:
        return 0.0
    result = result.double()
    same_infinity = torch.isinf(expected) & (result == expected)
    difference = torch.where(same_infinity, 0.0, (result - expected).abs())
    largest = torch.where(torch.isinf(expected), 0.0, expected.abs()).max()
    return (difference.max() / largest.clamp(min=1.0)).item()


def assert_close(result: Result, expected: Result, tolerance: float, what: object) -> None:
    for name, tensor in result.named().items():
        measured = error(tensor, expected.named()[name])
        # The comparison is written so that NaN fails it.
        assert measured <= tolerance, f"{name} off by {measured:.2e} > {tolerance:.0e}: {what}"
