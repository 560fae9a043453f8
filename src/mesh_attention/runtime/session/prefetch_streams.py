"""Streams on which calls are made ready while others compute.

Kernels that make a plan of a mask read sizes back to the host, which on the compute stream would
wait for all that came before. Memory that was made on a stream is given out there again as soon as
it is let go: so what a call reads is held until its last run is over, wherever that was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mesh_attention.runtime.session.prepared_call import PreparedCall, Retired


class AheadStreams:
    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._retired: Retired = deque()

    @contextmanager
    def making(self, call: PreparedCall, device: torch.device) -> Iterator[None]:
        """Around what makes a call ready, in a thread of its own."""
        if device.type != "cuda":
            yield
            return
        while self._retired and self._retired[0][0].query():  # type: ignore[no-untyped-call]
            self._retired.popleft()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
        call.was_made_on(stream, self._retired)
