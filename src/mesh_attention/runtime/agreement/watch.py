"""Calls on a device, whose ranks are compared without the host waiting for it.

`DeviceComparison` lets the device compare the identities of a call among ranks, turn the results of
calls that differ into NaN, and say so in memory that the host can read. `Watch` is a thread that
reads that memory and asks CUDA nothing, so it disturbs neither kernels nor captures. If ranks were
at different calls, or a call makes no progress, it finds the cause; whoever waits for the device
then goes on, with NaN, and the next call of the library raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.identity import Identity
from mesh_attention.runtime.device import current_stream, transfer_stream
from mesh_attention.version import TESTED_TORCH

_SPOILT = -1  # in place of the first call that differs
_SLOTS = 1024  # more calls than a host can be ahead of its device
_TURN_SECONDS = 0.05
_LOOK_AROUND_SECONDS = 1.0

FindDifference = Callable[[int, Identity], None]
FindFault = Callable[[Identity, timedelta, float], bool]


class _Launched(NamedTuple):
    place: int
    identity: Identity
    timeout: timedelta
    since: float


class Watch:
    """`find_difference` names the ranks that differ at a call; `find_fault` looks what became of
    the others, and says whether the calls are lost. Both are methods, held weakly: the thread ends
    when their owner is gone."""

    def __init__(
        self, comparison: DeviceComparison, find_difference: FindDifference, find_fault: FindFault
    ) -> None:
        self.comparison = comparison
        self._find_difference = WeakMethod(find_difference)
        self._find_fault = WeakMethod(find_fault)
        self._launched: deque[_Launched] = deque()
        self._last: _Launched | None = None
        self._awake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mesh_attention", daemon=True)
        self._thread.start()

    def begin(self, identity: Identity, place: int, timeout: timedelta) -> None:
        captured = torch.cuda.is_current_stream_capturing()
        if not captured:  # else it is not launched now
            self._last = _Launched(place, identity, timeout, monotonic())
            self._launched.append(self._last)
            if not self._awake.is_set():
                self._awake.set()
        self.comparison.begin(identity.number, place, captured=captured)

    def wait_for_verdict(self, seconds: float) -> None:
        """If the device has found a difference, its cause will be known soon."""
        if self.comparison.status[0] and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def stop(self) -> None:
        self._stopped.set()
        self._awake.set()

    def _run(self) -> None:
        looked = progressed = 0.0
        while True:
            self._awake.wait(_LOOK_AROUND_SECONDS)
            if self._stopped.wait(_TURN_SECONDS) or self._find_fault() is None:
                return
            now = monotonic()
            wrong, finished = (int(x) for x in self.comparison.status)
            if wrong < 0 or self._is_wrong(wrong):
                return
            while self._launched and self._launched[0].place <= finished:
                self._launched.popleft()
                progressed = now
            if not self._launched:
                self._awake.clear()
                if self._launched:  # in between
                    self._awake.set()
                continue
            first = self._launched[0]
            waited = now - max(first.since, progressed)
            if waited > _LOOK_AROUND_SECONDS and now - looked > _LOOK_AROUND_SECONDS:
                looked = now
                fault = self._find_fault()
                if fault is None or fault(first.identity, first.timeout, waited):
                    return

    def _is_wrong(self, wrong: int) -> bool:
        """Whether a call was found to be wrong, at its end or, where it never ends, before."""
        known = list(self._launched)
        at = [
            call
            for call in known
            if (call.place == wrong if wrong else self.comparison.differs(call.place))
        ]
        if not (wrong or at):
            return False
        find, call = self._find_difference(), at[0] if at else self._last
        if find is not None and call is not None:
            find(wrong or call.place, call.identity)
        return True


class DeviceComparison:
    """Nothing waits. The host can read at any time what was compared, and `status`: the first call
    that was wrong, and the last one that is over, by their places.

    It has a stream of its own, and the group's communicator: another one has threads of its own on
    the host, which cost more than the comparison. So it waits for no computation of its call, and
    for the transfers of earlier calls alone, which have the communicator before it. Transfers of
    calls that differ may never end; the numbers are there all the same.

    The numbers lie in memory of the host that the device reaches too, so that the all-reduce is all
    that a call launches for its comparison: nothing is copied to the device or back.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from mesh_attention.kernels.poison import poison_kernel

        # Not through the group: its way to the backend takes as long as the launch.
        self._backend: Any = group._get_backend(device)
        self._device = device
        self._stream = transfer_stream(device)
        self._poison = poison_kernel()
        self._slots = SharedNumbers(_SLOTS, device)
        self._captured: dict[int, SharedNumbers] = {}  # by place: a graph reads them again
        self._status = torch.zeros(2, dtype=torch.int64, device="cpu").pin_memory()
        self.status = self._status.numpy()
        self._compared = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._options.asyncOp = False  # on the current stream

    def begin(self, number: int, place: int, *, captured: bool) -> None:
        stream, before = self._stream, current_stream(self._device)
        if captured:
            self._captured[place] = SharedNumbers(1, self._device)
        if self._captured:
            # What graphs hold of comparisons runs where the caller replays them.
            stream.wait_stream(before)
        host, device = self._numbers(place)
        host[:] = number, -number
        torch.cuda.set_stream(stream)
        try:
            work = self._backend.allreduce([device], self._options)
            if work is not None:
                work.wait()
            self._compared.record(stream)
        finally:
            torch.cuda.set_stream(before)

    def _numbers(self, place: int) -> tuple[NDArray[np.int64], Tensor]:
        captured = self._captured.get(place)
        if captured is not None:
            return captured.host[0], captured.device[0]
        return self._slots.host[place % _SLOTS], self._slots.device[place % _SLOTS]

    def differs(self, place: int) -> bool:
        """Whether a call was compared, and ranks were at different ones."""
        highest, negative_of_lowest = self._numbers(place)[0]
        return bool(highest + negative_of_lowest)

    def settle(self, results: Iterable[Tensor], place: int) -> None:
        """What a wrong call has made, and everything after it, is NaN."""
        current_stream(self._device).wait_event(self._compared)
        self._poison(self._numbers(place)[1], self._status, place, tuple(results))

    def spoil(self) -> None:
        """The host knows that calls are wrong."""
        self.status[0] = _SPOILT


class SharedNumbers:
    """Pairs of numbers in the host's memory, as numpy arrays and as tensors of the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._memory = torch.zeros(count, 2, dtype=torch.int64, device="cpu").pin_memory()
            seen_by_device = torch.as_tensor(_OnDevice(self._memory), device=device)
        if seen_by_device.data_ptr() != self._memory.data_ptr():
            raise MeshAttentionError(
                f"torch {torch.__version__} copies pinned memory where it should share it with "
                f"{device}; use {TESTED_TORCH}"
            )
        self.host = [*self._memory.numpy()]
        self.device = [*seen_by_device]


class _OnDevice:
    """Pinned memory has the same address on the device, but PyTorch takes it for the CPU's."""

    def __init__(self, pinned: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i8",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }
        self._pinned = pinned  # PyTorch holds this object for as long as the tensor
