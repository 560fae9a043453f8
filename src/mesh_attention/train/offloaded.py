"""Tensors that wait for the backward pass in the host's memory, for `keep_attention.py`.

On CUDA they are copied to pinned memory on a stream of their own while their block is computed, and
back while the block after it has its backward pass. Until the next block begins, a tensor also
stays on the device; then the computing stream waits for the copies, and a tensor that was changed
in place meanwhile is an error. On the CPU tensors are simply copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from weakref import ref

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.request.kept_calls import Held


class HostMemory:
    """Counts what is offloaded: `num_bytes` now, `most_bytes` at the most. What would exceed
    `limit_bytes` stays on its device: `stayed_bytes` in all."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = self.most_bytes = self.stayed_bytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: OffloadedBlock | None = None

    def next_block(self) -> OffloadedBlock:
        if self._latest is not None:
            for held in self._latest.tensors:
                with suppress(MeshAttentionError):  # changed: its own backward pass says so
                    held.leave()
        self._latest = OffloadedBlock(self, self._latest)
        return self._latest

    def hold(self, x: Tensor) -> Offloaded | None:
        num_bytes = x.nbytes
        if x.is_cuda:
            num_bytes = sum(1 << (size - 1).bit_length() for size in _pieces(x.nbytes))
        if self.limit_bytes is not None and self.num_bytes + num_bytes > self.limit_bytes:
            self.stayed_bytes += x.nbytes
            return None
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        if x.is_cuda and x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return Offloaded(x, self, num_bytes, self._streams.get(x.device))


class OffloadedBlock:
    """The tensors that one block leaves to its backward pass. It knows those of the block `before`,
    whose backward pass comes next."""

    def __init__(self, memory: HostMemory, before: OffloadedBlock | None) -> None:
        self._memory = memory
        self._before = [] if before is None else before._held
        self._held: list[ref[Offloaded]] = []

    @property
    def tensors(self) -> list[Offloaded]:
        return [held for weak in self._held if (held := weak()) is not None]

    def hold(self, x: Tensor) -> Held:
        held = self._memory.hold(x) if x.numel() else None
        if held is None:
            return Held(x)
        self._held.append(ref(held))
        return held

    def fetch_ahead(self) -> None:
        """Starts copies back: of what this block needs, then of what the block before it needs."""
        for weak in (*self._held, *self._before):
            if (held := weak()) is not None:
                held.fetch()


class Offloaded(Held):
    """A tensor with a copy in the host's memory. `leave` ends its stay on the device, `fetch`
    starts a copy back, and `take`, in a backward pass, returns the tensor; another pass copies
    again."""

    def __init__(
        self, x: Tensor, memory: HostMemory, num_bytes: int, stream: torch.cuda.Stream | None
    ) -> None:
        self._memory, self._num_bytes = memory, num_bytes
        self._device, self._stream = x.device, stream
        self._here: Held | None = Held(x)
        self._fetched: Tensor | None = None
        self._like = torch.empty_like(x, device="meta")
        parts, pinned = _parts(x.detach()), stream is not None
        self._host = [torch.empty_like(part, device="cpu", pin_memory=pinned) for part in parts]
        self._copy(self._host, parts)

    def _copy(self, to: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for target, part in zip(to, parts, strict=True):
                target.copy_(part, non_blocking=self._stream is not None)
            if self._stream is not None:
                self._copied = self._stream.record_event()

    def _wait(self) -> None:
        """Lets the computing stream wait for the copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def leave(self) -> Tensor | None:
        if self._here is None:
            return None
        self._wait()
        x, self._here = self._here.take(), None
        return x

    def fetch(self) -> None:
        if self._here is None and self._fetched is None:
            # Memory that the computing stream has given up before the copy begins.
            self._fetched = torch.empty_like(self._like, device=self._device)
            self._copy(_parts(self._fetched), self._host)

    def take(self) -> Tensor:
        x = self.leave()
        if x is None:
            self.fetch()
            self._wait()
            x, self._fetched = self._fetched, None
        assert x is not None
        return x

    def __del__(self) -> None:
        self._memory.num_bytes -= self._num_bytes
        here = None if self._here is None else self._here._tensor
        for x in (here, self._fetched):
            if x is not None and self._stream is not None:  # nobody has waited for its copy
                x.record_stream(self._stream)


_SMALLEST_PIECE = 20  # a MiB, as a power of two


def _pieces(num_bytes: int) -> list[int]:
    """PyTorch pins memory in powers of two, so a tensor is pinned in pieces of such sizes; what is
    less than a MiB of it in one more."""
    bits = reversed(range(_SMALLEST_PIECE, num_bytes.bit_length()))
    sizes = [1 << bit for bit in bits if num_bytes >> bit & 1]
    rest = num_bytes - sum(sizes)
    return [*sizes, rest] if rest else sizes


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Views of a tensor by its pieces; of one that is not contiguous there is one."""
    if not x.is_contiguous():
        return (x,)
    sizes = [size // x.element_size() for size in _pieces(x.nbytes)]
    return torch.split_with_sizes(x.view(-1), sizes)
