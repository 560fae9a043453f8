"""Which call this is: compared among all ranks whenever a call begins, before its data is used.

Ranks that are out of step would take each other's data for their own: one skips a call, two objects
are called in opposite order, two kinds of call that were agreed on before are mixed. So every pass
begins with an all-reduce of one number, the same on all ranks if all are at the same call.

With gloo the host waits for it, and ranks that differ raise before anything moves. With NCCL
nothing waits: the device compares, turns the results of calls that differ into NaN and says so in
memory that the host can read; `Watch` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Statement = dict[str, Any]  # what ranks compare of a kind of call, by name

_SPOILT = -1  # in place of the first call that differs
_TURN = timedelta(seconds=1)  # then whoever waits looks what became of the others


@dataclass(frozen=True)
class AgreedKind:
    """A kind of call that all ranks have agreed on."""

    statement: Statement

    @cached_property
    def digest(self) -> str:
        return json.dumps(self.statement, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """One call. `user` is the object it is made on, in the order in which they were made; `label`
    is what the caller calls it; a backward pass `belongs_to` a forward call, by its place among
    the calls."""

    kind: AgreedKind
    direction: str
    user: int
    label: str = ""
    belongs_to: int = 0

    @property
    def number(self) -> int:
        text = f"{self.direction} {self.user} {self.belongs_to} {self.label} {self.kind.digest}"
        found = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(found, "big") >> 2  # its negative is compared too

    @property
    def statement(self) -> Statement:
        """For people: in what two calls differ."""
        return self.kind.statement | {
            "pass": self.direction,
            "number of the object": self.user,
            "label": self.label,
            "number of its forward call": self.belongs_to,
        }


class HostComparison:
    """The host waits; `look_around` is asked whenever a turn is over, and raises if it is in
    vain."""

    def __init__(self, group: dist.ProcessGroup, look_around: Callable[[float], None]) -> None:
        self._group = group
        self._look_around = look_around

    def agrees(self, number: int) -> bool:
        pair = torch.tensor([number, -number])
        work = dist.all_reduce(pair, dist.ReduceOp.MAX, self._group, async_op=True)
        begun = monotonic()
        while True:
            try:
                work.wait(_TURN)
                break
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # not ours: the group's own timeout
                    raise
            self._look_around(monotonic() - begun)
        highest, negative_of_lowest = pair.tolist()
        return bool(highest == -negative_of_lowest)


class DeviceComparison:
    """Nothing waits. `status` is read by the host at any time: is a call wrong, which call was
    compared last, and which one is over."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        from mesh_attention.kernels.poison import poison_kernels

        self._group = group
        self._device = device
        self._stream = stream
        self._kernels = poison_kernels()
        with torch.cuda.stream(stream):  # the only one that uses them
            self._signs = torch.tensor([1, -1], device=device)
            self._pair = torch.zeros_like(self._signs)
        self._status = torch.zeros(3, dtype=torch.int64).pin_memory()
        self.status = self._status.numpy()
        self._compared = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, number: int, place: int) -> None:
        """On the stream of communications, which need not wait for computation to get here."""
        if torch.cuda.is_current_stream_capturing():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch.mul(self._signs, number, out=self._pair)
            dist.all_reduce(self._pair, dist.ReduceOp.MAX, self._group)
            self._kernels.compare(self._pair, self._status, place)
            self._compared.record(self._stream)

    def settle(self, results: Iterable[Tensor], place: int) -> None:
        """What a wrong call has made, and everything after it, is NaN."""
        torch.cuda.current_stream(self._device).wait_event(self._compared)
        self._kernels.poison(self._status, place, tuple(results))

    def spoil(self) -> None:
        """The host knows that calls are wrong."""
        self.status[0] = _SPOILT
