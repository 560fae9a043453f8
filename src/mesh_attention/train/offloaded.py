"""Tensors that wait for the backward pass in the host's memory.

On CUDA they are copied to pinned memory on a stream of their own, and back while the block before
theirs has its backward pass. The host waits for the copies of the block before the last one, or it
would give out the device's memory to all blocks. On the CPU they are copies.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

import torch
from torch import Tensor

from mesh_attention.request.kept_calls import Held, HeldHere

_BLOCKS_IN_FLIGHT = 2


class HostMemory:
    """`limit_bytes`: the most that is taken; what does not fit stays on its device. `num_bytes` are
    taken now, `most_bytes` were at some time, and `stayed_bytes` in all did not fit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = self.most_bytes = self.stayed_bytes = 0
        self._copied: deque[list[torch.cuda.Event]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: ref[OffloadedBlock] | None = None

    def next_block(self) -> OffloadedBlock:
        self._copied.append([stream.record_event() for stream in self._streams.values()])
        if len(self._copied) > _BLOCKS_IN_FLIGHT:
            for event in self._copied.popleft():
                event.synchronize()
        block = OffloadedBlock(self, self._latest)
        self._latest = ref(block)
        return block

    def hold(self, x: Tensor) -> _Offloaded | None:
        # PyTorch pins memory in powers of two.
        num_bytes = 1 << (x.nbytes - 1).bit_length() if x.is_cuda else x.nbytes
        if self.limit_bytes is not None and self.num_bytes + num_bytes > self.limit_bytes:
            self.stayed_bytes += x.nbytes
            return None
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        if x.is_cuda and x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return _Offloaded(x, self, num_bytes, self._streams.get(x.device))


class OffloadedBlock:
    """What one block leaves to its backward pass. It knows the block before it, whose backward pass
    comes after its own."""

    def __init__(self, memory: HostMemory, before: ref[OffloadedBlock] | None) -> None:
        self._memory, self._before = memory, before
        self._tensors: list[ref[_Offloaded]] = []

    def hold(self, x: Tensor) -> Held:
        held = self._memory.hold(x) if x.numel() else None
        if held is None:
            return HeldHere(x)
        self._tensors.append(ref(held))
        return held

    def fetch_ahead(self) -> None:
        """What this block needs and is not on its way yet, then what the one before it needs."""
        for block in (self, self._before and self._before()):
            for tensor in block._tensors if block else ():
                if (held := tensor()) is not None:
                    held.fetch()


class _Offloaded:
    """A copy in memory of the host, from which a tensor is made for each backward pass."""

    def __init__(
        self, x: Tensor, memory: HostMemory, num_bytes: int, stream: torch.cuda.Stream | None
    ) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        self._device, self._stream = x.device, stream
        self._fetched: Tensor | None = None
        self._host = torch.empty_like(x.detach(), device="cpu", pin_memory=stream is not None)
        self._copy(self._host, x.detach())
        if stream is not None:
            x.record_stream(stream)  # whoever had it may let it go before it is copied

    def _copy(self, to: Tensor, x: Tensor) -> None:
        """After all that is computed so far."""
        if self._stream is None:
            to.copy_(x)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(x, non_blocking=True)
            self._done = self._stream.record_event()

    def fetch(self) -> None:
        if self._fetched is None:
            # Memory that the computing stream has given up before the copy begins.
            self._fetched = torch.empty_like(self._host, device=self._device)
            self._copy(self._fetched, self._host)

    def take(self) -> Tensor:
        self.fetch()
        x, self._fetched = self._fetched, None
        assert x is not None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return x

    def __del__(self) -> None:
        self._memory.num_bytes -= self._num_bytes
        if self._fetched is not None and self._stream is not None:  # nobody has waited for it
            self._fetched.record_stream(self._stream)
