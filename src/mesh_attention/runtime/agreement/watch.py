"""A thread that watches calls on a device: the host waits for none of them.

It reads memory that the device writes, and asks CUDA nothing, so it disturbs neither kernels nor
captures. If ranks were at different calls, or a call makes no progress, it finds the cause; whoever
waits for the device then goes on, with NaN, and the next call of the library raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import NamedTuple
from weakref import WeakMethod

import torch

from mesh_attention.runtime.agreement.identity import DeviceComparison, Identity

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
