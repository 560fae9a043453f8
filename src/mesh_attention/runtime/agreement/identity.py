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
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from hashlib import blake2b
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement.batch_identity import OF_FORWARD_CALL, BatchIdentity
from mesh_attention.runtime.device import transfer_stream
from mesh_attention.version import TESTED_TORCH

Statement = dict[str, Any]  # what ranks compare of a kind of call, by name

BATCH_NUMBER = "number of the batch"
GATHERED = "number of calls that gather over these ranks"
# Of what ranks state: where they are in their programs, and not with what they call; and what one
# kind of call alone states, where they have not come to a pass yet.
ORDER = (
    "pass",
    "number of the object",
    "label",
    "number of its forward call",
    BATCH_NUMBER,
    GATHERED,
)
OF_ONE_KIND = (
    "needs_grad", "unshard", "cross_entropy", "linear_cross_entropy", "log_probs", "token_mean",
    "programs",
)  # fmt: skip

_SPOILT = -1  # in place of the first call that differs
_SLOTS = 1024  # more calls than a host can be ahead of its device
_TURN = timedelta(seconds=1)  # then whoever waits looks what became of the others


@dataclass
class AgreedKind:
    """A kind of call that all ranks have agreed on, and with which collectives, where they said
    so. `last_call`: how many calls all ranks had been at together when they were at such a one."""

    statement: Statement
    meetings: Statement = field(default_factory=dict)
    last_call: int = 0

    @property
    def agreed_statement(self) -> Statement:
        """As it was compared."""
        return self.statement | ({"meetings": self.meetings} if self.meetings else {})

    @cached_property
    def digest(self) -> str:
        text = json.dumps(self.statement, sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Identity:
    """One call. `user` is the object it is made on, in the order in which they were made; `label`
    is what the caller calls it; a backward pass `belongs_to` a forward call, by its place among
    the calls. `sinks`: whether it has some; `batch`: what it is made on."""

    kind: AgreedKind
    direction: str
    user: int
    label: str = ""
    belongs_to: int = 0
    sinks: bool = False
    batch: BatchIdentity = OF_FORWARD_CALL

    @property
    def number(self) -> int:
        place = f"{self.direction} {self.user} {self.belongs_to} {self.sinks}"
        batch = f"{self.batch.number} {self.batch.contents}"
        text = f"{place} {self.label} {batch} {self.kind.digest}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 2  # its negative is compared too

    @property
    def statement(self) -> Statement:
        """For people: in what two calls differ."""
        return self.kind.statement | {
            "pass": self.direction,
            "number of the object": self.user,
            "label": self.label,
            "number of its forward call": self.belongs_to,
            "sinks": self.sinks,
            BATCH_NUMBER: self.batch.number,
            "the whole batch": self.batch.contents,
        }


class HostComparison:
    """The host waits for the comparison."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def agrees(self, number: int, look_around: Callable[[float], None]) -> bool:
        """`look_around` is asked whenever a turn is over, and raises if waiting is in vain."""
        pair = torch.tensor([number, -number], device="cpu")  # whatever the default device is
        work = dist.all_reduce(pair, dist.ReduceOp.MAX, self._group, async_op=True)
        begun = monotonic()
        while True:
            try:
                work.wait(_TURN)
                break
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # not ours: the group's own timeout
                    raise
            look_around(monotonic() - begun)
        highest, negative_of_lowest = pair.tolist()
        return bool(highest == -negative_of_lowest)


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


@cache
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    fields = {"stream_id": stream_id, "device_index": device_index, "device_type": device_type}
    return torch.cuda.Stream(**fields)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`, which makes a new object each time and takes several us."""
    return _stream(*torch._C._cuda_getCurrentStream(device.index))
