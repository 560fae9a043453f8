"""What messages might bring: normal tokens, statistics of the size that long sequences have.

Never zeros: matrix units draw less power on them and run faster, and merging equal nothings tests
nothing. A stand-in reads from a small stock of such numbers, over and over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.plan.buffers import Buffer, Kind, Role
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.runtime.binding import CallShape

__all__ = ["STOCK_BYTES", "Stock", "fill", "inputs_of"]

STOCK_BYTES = 1 << 20  # of each kind of number; small enough to stay in the L2 cache


def fill(kind: Kind, tensor: Tensor) -> None:
    """Half a million keys have an LSE of about 13; delta sums products that mostly cancel."""
    tensor.normal_(std=0.1 if kind.is_statistic else 1.0)
    if kind is Kind.LSE:
        tensor.add_(13.0)


def inputs_of(program: Program, plan: Plan, call_shape: CallShape) -> dict[str, Tensor]:
    """The caller's shards of one rank."""
    given = {}
    for buffer in program.buffers:
        if buffer.role is Role.INPUT:
            width = buffer.kind.width(plan.problem)
            shape = (buffer.num_rows, call_shape.batch, buffer.num_heads, width)
            tensor = torch.empty(shape, dtype=call_shape.dtype_of(buffer), device=call_shape.device)
            fill(buffer.kind, tensor)
            given[buffer.name] = tensor
    return given


class Stock:
    """Random numbers by kind and dtype, made when first asked for, at least so many."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[object, torch.dtype], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(made.numel() * made.element_size() for made in self._made.values())

    def of(self, buffer: Buffer, dtype: torch.dtype, count: int = 0) -> Tensor:
        kind = buffer.kind if buffer.kind.is_statistic else Kind.Q
        made = self._made.get((kind, dtype))
        if made is None or made.numel() < count:
            count = max(count, STOCK_BYTES // dtype.itemsize)
            made = torch.empty(count, dtype=dtype, device=self._device)
            fill(kind, made)
            self._made[kind, dtype] = made
        return made
