"""Tensors that wait for the backward pass in the host's memory.

On CUDA they are copied to pinned memory on a stream of their own, and back while the block that
comes before theirs in the backward pass is computed. What a device holds for it is two blocks: the
host waits for the copies of the block before the last, or it would give out memory for all of them.
On the CPU they are copies, so that the same code runs everywhere.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mesh_attention.request.kept_calls import Held, HeldHere

_BLOCKS_IN_FLIGHT = 2


class HostMemory:
    """`limit_bytes`: the most that is taken; what comes when it is taken stays on its device.
    `num_bytes` are taken now, `most_bytes` were; `stayed_bytes` did not go, since the beginning."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = self.most_bytes = self.stayed_bytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copies: deque[torch.cuda.Event] = deque()
        self._latest: ref[OffloadedBlock] | None = None

    def next_block(self) -> OffloadedBlock:
        for stream in self._streams.values():
            self._copies.append(_event_after(stream))
        while len(self._copies) > _BLOCKS_IN_FLIGHT * len(self._streams):
            self._copies.popleft().synchronize()
        block = OffloadedBlock(self, None if self._latest is None else self._latest())
        self._latest = ref(block)
        return block

    def has_room(self, x: Tensor) -> bool:
        if self.limit_bytes is None or self.num_bytes + host_bytes(x) <= self.limit_bytes:
            return True
        self.stayed_bytes += x.nbytes
        return False

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class OffloadedBlock:
    """What one block leaves to its backward pass. Blocks know the one before theirs, as long as
    that has its own backward pass to come."""

    def __init__(self, memory: HostMemory, before: OffloadedBlock | None) -> None:
        self._memory = memory
        self._before = None if before is None else ref(before)
        self._tensors: list[ref[_Offloaded]] = []

    def hold(self, x: Tensor) -> Held:
        if not x.numel() or not self._memory.has_room(x):
            return HeldHere(x)
        held = _OnHost(x, self._memory) if x.is_cuda else _Offloaded(x, self._memory)
        self._tensors.append(ref(held))
        return held

    def fetch(self) -> None:
        for tensor in self._tensors:
            if (held := tensor()) is not None:
                held.fetch()

    def fetch_ahead(self) -> None:
        """What this block needs, if it is not on its way, then what the next one to run needs."""
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()


class _Offloaded:
    """A copy."""

    def __init__(self, x: Tensor, memory: HostMemory) -> None:
        self._memory, self._num_bytes = memory, host_bytes(x)
        memory.count(self._num_bytes)
        self._host = self._copied_to_host(x)

    def _copied_to_host(self, x: Tensor) -> Tensor:
        return x.detach().clone()

    def fetch(self) -> None:
        """Nothing is far on the CPU."""

    def take(self) -> Tensor:
        return self._host.clone()

    def __del__(self) -> None:
        self._memory.count(-self._num_bytes)


class _OnHost(_Offloaded):
    """A copy in pinned memory. Its tensor is made anew on the device for each backward pass."""

    _fetched: tuple[Tensor, torch.cuda.Event] | None = None

    def _copied_to_host(self, x: Tensor) -> Tensor:
        x = x.detach()
        self._device, self._stream = x.device, self._memory.stream(x.device)
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self._copy(host, x)
        x.record_stream(self._stream)  # whoever had it may let it go before it is copied
        return host

    def fetch(self) -> None:
        if self._fetched is None:
            # Memory of the computing stream: it was given up there by what came before.
            x = torch.empty_like(self._host, device=self._device)
            self._copy(x, self._host)
            self._fetched = x, _event_after(self._stream)

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        (x, fetched), self._fetched = self._fetched, None
        torch.cuda.current_stream(self._device).wait_event(fetched)
        return x

    def _copy(self, to: Tensor, x: Tensor) -> None:
        """When what was computed until now is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(x, non_blocking=True)

    def __del__(self) -> None:
        if self._fetched is not None:  # on its way, and nobody has waited for it
            self._fetched[0].record_stream(self._stream)
        super().__del__()


def host_bytes(x: Tensor) -> int:
    """PyTorch pins memory in powers of two."""
    return 1 << (x.nbytes - 1).bit_length() if x.is_cuda else x.nbytes


def _event_after(stream: torch.cuda.Stream) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
