"""The workspace: one block of memory per device, at whose planned offsets all buffers lie.

It is kept between calls and grows to the largest call. What executors have bound to a block (views
of its buffers) is kept with it and ends with it. With `poison` every byte is set so that anything
read before it was written turns the result into NaN; tests run that way. On a CPU each buffer is
set again when it is first used, since other buffers may have lain there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_ALL_ONES = 0xFF  # every floating-point type reads this as NaN


@dataclass(eq=False, slots=True)
class WorkspaceBlock:
    memory: Tensor
    # By whoever bound it, for as long as that lives.
    bound: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)
    _last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a call. Calls share the memory, so one on another CUDA stream follows the one
        before it. Those of one stream do so by themselves, and so does what a graph captures."""
        if not self.memory.is_cuda or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])
        try:
            yield
        finally:
            event = torch.cuda.Event() if self._last is None else self._last[1]  # type: ignore[no-untyped-call]
            event.record(stream)
            self._last = stream, event


class Workspace:
    def __init__(self, *, poison: bool = False) -> None:
        self._blocks: dict[torch.device, WorkspaceBlock] = {}
        self._adopted: set[torch.device] = set()
        self.poisons = poison

    def poisons_buffers(self, device: torch.device) -> bool:
        return self.poisons and device.type == "cpu"

    def take(self, num_bytes: int, device: torch.device) -> WorkspaceBlock:
        block = self._blocks.get(device)
        if block is None or block.memory.numel() < num_bytes:
            assert device not in self._adopted, "others read what we would write elsewhere"
            # Give the old block back, views and all, before asking for a larger one.
            self._blocks.pop(device, None)
            del block
            block = WorkspaceBlock(torch.empty(num_bytes, dtype=torch.uint8, device=device))
            self._blocks[device] = block
        return block

    def adopt(self, memory: Tensor) -> None:
        """Use this block from now on, because others made it (and must be able to read it)."""
        self._blocks[memory.device] = WorkspaceBlock(memory)
        self._adopted.add(memory.device)

    def poison(self, memory: Tensor, outputs: Iterable[Tensor]) -> None:
        memory.fill_(_ALL_ONES)
        for output in outputs:
            output.fill_(torch.nan)

    def release(self) -> None:
        self._blocks.clear()
        self._adopted.clear()


@dataclass(frozen=True)
class PassMemory:
    """Bytes on the device that a pass of this rank takes, besides the caller's tensors."""

    workspace_bytes: int  # one for all passes and calls, as large as the largest needs it
    kernel_bytes: int  # at most, while a kernel call runs: its results, and its library's own
    mask_bytes: int = 0  # tables of the masks, which both passes may share, as far as they are made

    @property
    def total_bytes(self) -> int:
        return self.workspace_bytes + self.kernel_bytes + self.mask_bytes
