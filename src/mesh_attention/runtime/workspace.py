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
        self._adopted: set[torch.device] = set()
        self._poison = poison

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        memory = self._memory.get(device)
        if memory is None or memory.numel() < num_bytes:
            assert device not in self._adopted, "others read what we would write elsewhere"
            self._memory.pop(device, None)  # give the old block back before asking for a larger one
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._memory[device] = memory
        return memory

    def adopt(self, memory: Tensor) -> None:
        """Use this block from now on, because others made it (and must be able to read it)."""
        self._memory[memory.device] = memory
        self._adopted.add(memory.device)

    def give_up(self, device: torch.device) -> None:
        """Let an adopted block go, so that those who made it can free it."""
        if device in self._adopted:
            self._adopted.remove(device)
            del self._memory[device]

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
        self._adopted.clear()
