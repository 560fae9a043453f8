"""The workspace: one block of memory per device, at whose planned offsets all buffers lie.

It is kept between calls and grows to the largest call. With `poison` every byte is set so that
anything read before it was written turns the result into NaN; tests run that way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Workspace"]

_ALL_ONES = 0xFF  # every floating-point type reads this as NaN


class Workspace:
    def __init__(self, *, poison: bool = False) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self._poison = poison

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        memory = self._memory.get(device)
        if memory is None or memory.numel() < num_bytes:
            self._memory.pop(device, None)  # give the old block back before asking for a larger one
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._memory[device] = memory
        return memory

    def poison(self, memory: Tensor, outputs: Iterable[Tensor]) -> None:
        if not self._poison:
            return
        memory.fill_(_ALL_ONES)
        for output in outputs:
            output.fill_(torch.nan)

    @property
    def num_bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())

    def release(self) -> None:
        self._memory.clear()
