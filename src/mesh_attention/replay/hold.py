"""Stand-ins for communications on a CUDA stream of their own.

With `sms` > 0 a stand-in is one kernel of so many programs, each of which fills an SM, as NCCL's
rings do. With `sms=0` it stands for copy engines: the driver copies the bytes (a kernel does where
some heads of every row are written), and one warp waits. Either way it ends when the modelled time
has passed since it really began, or when its bytes are written if that takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from mesh_attention.replay.hold_kernel import hold_kernel, stamp_kernel, until_kernel
from mesh_attention.replay.received import STOCK_BYTES, Stock
from mesh_attention.replay.runs import Description, describe, runs_of
from mesh_attention.replay.transport import Landing
from mesh_attention.runtime.streams import Marks
from mesh_attention.runtime.transport.interface import Handle, Start

__all__ = ["CudaHolder", "Mode"]

WARPS = 32
# Launching and draining a stand-in, taken off its time (found on an H200: 1.9 to 2.2 us).
OVERHEAD_SECONDS = 2e-6
_WORDS = {2: tl.int16, 4: tl.int32}


class Mode(Enum):
    KEEP_TIME = auto()
    HURRY = auto()  # writes the bytes and does not wait, for warming up
    SILENT = auto()  # does nothing: the computation is alone


class CudaHolder:
    def __init__(self, device: torch.device, sms: int, *, high_priority: bool = True) -> None:
        # Lower is earlier: programs of the stand-in take the next SMs that fall free.
        self.stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0)  # type: ignore[no-untyped-call]
        self.mode = Mode.KEEP_TIME
        self._device = device
        self._sms = sms
        self._stock = Stock(device)
        self._tables: dict[Description, Tensor] = {}
        self._stamp = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """GPU memory of the random numbers."""
        return self._stock.num_bytes

    def prepare(self, landings: Sequence[Landing], seconds: float) -> Start:
        work = self._filling(landings) if self._sms else self._copying(landings)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        nanoseconds = max(0, round((seconds - OVERHEAD_SECONDS) * 1e9))

        def start(after: Marks) -> Handle:
            if self.mode is Mode.SILENT:
                return _Done()
            with torch.cuda.stream(self.stream):
                for mark in after:
                    self.stream.wait_event(mark)
                work(nanoseconds if self.mode is Mode.KEEP_TIME else 0)
                event.record(self.stream)
            return _Held(event, self._device)

        return start

    def _filling(self, landings: Sequence[Landing]) -> Callable[[int], object]:
        pieces = [runs_of(x, self._stock.of(buffer, x.dtype)) for buffer, x in landings]
        found = describe(pieces)
        # The caller's tensors come anew with every call, most often where they were before.
        if found not in self._tables:
            self._tables[found] = torch.tensor(
                found.numbers or ((0,) * 5,), dtype=torch.int64, device=self._device
            )
        options: dict[str, Any] = {
            "WORD": _WORDS[found.word_bytes],
            "STOCK_WORDS": STOCK_BYTES // found.word_bytes,
            "ROWS": found.rows,
            "COLUMNS": found.columns,
            "ALIGNED": found.aligned,
            "num_warps": WARPS,
        }
        table, count = self._tables[found], len(found.numbers)
        return lambda nanoseconds: hold_kernel[(self._sms,)](table, count, nanoseconds, **options)

    def _copying(self, landings: Sequence[Landing]) -> Callable[[int], object]:
        pairs = [
            (x, self._stock.of(buffer, x.dtype, x.numel())[: x.numel()].view(x.shape))
            for buffer, x in landings
        ]

        def work(nanoseconds: int) -> None:
            stamp_kernel[(1,)](self._stamp, num_warps=1)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            until_kernel[(1,)](self._stamp, nanoseconds, num_warps=1)

        return work


class _Held:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Done:
    def ready(self) -> bool:
        return True

    def wait(self) -> None: ...
