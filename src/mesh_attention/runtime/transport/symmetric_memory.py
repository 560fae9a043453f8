"""PyTorch's symmetric memory behind the few calls we need: the only file that uses its names.

They are private, so they are looked for before use and a missing one is named. A rendezvous numbers
its messages by how many a process has made before, in any group (pytorch#196082), so ranks with
different histories would deadlock; the store below numbers them afresh. It also tells those who
wait when another has failed.
"""

from __future__ import annotations

import ctypes
import re
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from mesh_attention.runtime.transport.groups import backends_of
from mesh_attention.runtime.transport.job_store import PatientStore, forget
from mesh_attention.runtime.transport.make_group import group_name
from mesh_attention.version import TESTED_TORCH

# Channels of the signal pads. Signals between two ranks on one channel come in program order.
READY, DONE, _BARRIER = range(3)

_CLASS = "torch._C._distributed_c10d._SymmetricMemory"
_WANTED = (
    "barrier",
    "empty_strided_p2p",
    "get_backend",
    "get_buffer",
    "put_signal",
    "rendezvous",
    "wait_signal",
)
_FUNCTIONS = ("_register_process_group", "_unregister_process_group", "ProcessGroup")


def obstacle(device: torch.device) -> str | None:
    """Why this process cannot use symmetric memory; None if nothing is known against it."""
    if device.type != "cuda":
        return f"the tensors are on the {device.type}, and symmetric memory is for CUDA"
    binding = torch._C._distributed_c10d
    memory = getattr(binding, "_SymmetricMemory", None)
    lacking = [name for name in _FUNCTIONS if not hasattr(binding, name)]
    lacking += [name for name in _WANTED if not hasattr(memory, name)]
    if memory is None or lacking:
        what = ", ".join(lacking) if memory is not None else _CLASS
        return f"torch {torch.__version__} has no {what}; {TESTED_TORCH} have it"
    backend = memory.get_backend(device)
    if backend != "CUDA":
        return f"PyTorch's symmetric memory works by {backend} here, and only 'CUDA' is supported"
    return None


class SymmetricBlock:
    """As many bytes on each of several ranks, which all of them can read.

    Made by all members with the same size, then connected by all of them.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.own: Tensor = _binding().empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._name = f"mesh_attention/symmetric/{uuid.uuid4()}"  # of this process alone
        self._group: Any = None
        self._store: RendezvousStore | None = None
        self._registered = False
        self._handle: Any = None
        self._peers: dict[int, Tensor] = {}
        self._timeout_ms = 0

    def connect(
        self, parent: dist.ProcessGroup, store: Store, member: int, size: int, timeout: timedelta
    ) -> None:
        """`store` has served no rendezvous before; `member` of `size` is our place."""
        binding: Any = torch._C._distributed_c10d
        # A group without connections of its own: the rendezvous asks it for store, rank and size.
        # Its backend lends a name to log records; C++ holds the store, but not its Python part.
        self._store = RendezvousStore(store, timeout)
        self._group = binding.ProcessGroup(self._store, member, size)
        kind, backend = binding.ProcessGroup.BackendType.CUSTOM, next(backends_of(parent), None)
        self._group._register_backend(torch.device("cpu"), kind, backend)
        binding._register_process_group(group_name(self._name), self._group)
        self._registered = True
        try:
            self._handle = _binding().rendezvous(self.own, group_name(self._name))
        except Exception:
            self._store.tell_failure()
            raise
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        for peer in range(size):
            shape = (self.own.numel(),)
            buffer = self._handle.get_buffer(peer, shape, torch.uint8, 0)
            self._peers[peer] = self.own if peer == member else buffer

    def connected(self) -> None:
        """All members are: nobody reads the store any more."""
        if self._store is not None:
            self._store.forget()

    def of(self, member: int) -> Tensor:
        """The bytes of a member; they are ours to read between its signals."""
        return self._peers[member]

    def put(self, member: int, channel: int) -> None:
        """Tell a member, on the current stream, that what went before is done."""
        self._handle.put_signal(member, channel, self._timeout_ms)

    def wait(self, member: int, channel: int) -> None:
        """Hold the current stream until that member tells us."""
        self._handle.wait_signal(member, channel, self._timeout_ms)

    def barrier(self) -> None:
        """`put` to and `wait` for all members at once."""
        self._handle.barrier(_BARRIER, self._timeout_ms)

    def release(self) -> None:
        """Waits for the device: others may still read, and what they do is signalled on it."""
        if self._registered:
            self._registered = False
            binding: Any = torch._C._distributed_c10d
            binding._unregister_process_group(group_name(self._name))
        self._peers.clear()
        self._handle = self._group = self._store = None
        del self.own

    def abandon(self) -> None:
        """Leave it to the end of the process: to free it now would be to wait for the device."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class RendezvousStore(PatientStore):
    """The store of one rendezvous, on top of a store that has served no other."""

    _NUMBERED = re.compile(r"(.*/)(\d+)(/\d+)")
    failed = "a member has failed"

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__(store, timeout)
        self._first: int | None = None
        self._written: dict[str, None] = {}

    def tell_failure(self) -> None:
        self._store.set(self.failed, "")

    def forget(self) -> None:
        for key in self._written:
            forget(self._store, key)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._written[self._key(key)] = None
        super().set(key, value)

    def _key(self, key: str) -> str:
        """With message numbers that begin at 0."""
        match = self._NUMBERED.fullmatch(key)
        if match is None:
            return key
        if self._first is None:
            self._first = int(match[2])
        return f"{match[1]}{int(match[2]) - self._first}{match[3]}"


def _binding() -> Any:
    return torch._C._distributed_c10d._SymmetricMemory
