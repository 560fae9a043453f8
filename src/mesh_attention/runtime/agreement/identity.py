"""Which call this is: compared among all ranks whenever a call begins, before its data is used.

Ranks that are out of step would take each other's data for their own: a rank skips a call, two
objects are called in opposite order, two kinds of call that were agreed on before are mixed, or a
rank has left out a batch. So every pass has an `Identity`, and begins with an all-reduce of its
number, which is the same on all ranks if all are at the same call. With gloo the host waits for
that (`HostComparison`), and ranks that differ raise before anything moves. With NCCL the device
compares (`watch.py`).

Calls on two batches look alike, so a `BatchIdentity` says which batch a call is made on.
`shard_batch` gives every batch a number and says what it holds; the batch, its documents and its
labels keep both. Whatever is cut by `shard` or described by `documents` has a number too, and goes
with the calls that follow. Loaders run ahead, on each rank by as much as they like: so `BatchCount`
counts batches in the thread that made the first object, and others are known by what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from threading import get_ident
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Statement = dict[str, Any]  # what ranks compare of a kind of call, by name

BATCH_NUMBER = "number of the batch"
GATHERED = "number of calls that gather over these ranks"
# Names in statements. `ORDER`: where a rank is in its program, and not with what it calls.
# `OF_ONE_KIND`: what one kind of call alone states, by which kinds are told apart before a pass.
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

_TURN = timedelta(seconds=1)  # then whoever waits looks what became of the others
_SAMPLED = 64  # numbers of a tensor
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class AgreedKind:
    """A kind of call that all ranks have agreed on. `meetings`: digests of its collectives, where
    ranks compared them. `last_call`: how many calls all ranks had begun together when they began
    the latest call of this kind."""

    statement: Statement
    meetings: Statement = field(default_factory=dict)
    last_call: int = 0

    @property
    def agreed_statement(self) -> Statement:
        """What ranks compared when they agreed."""
        return self.statement | ({"meetings": self.meetings} if self.meetings else {})

    @cached_property
    def digest(self) -> str:
        text = json.dumps(self.statement, sort_keys=True)
        return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """`number`: None where the batch was made in another thread; `contents`: digests of a few
    of its numbers, or what it holds in words."""

    number: int | None = 0
    contents: str = ""


OF_FORWARD_CALL = BatchIdentity()  # a backward pass has the batch of that


@dataclass(frozen=True, slots=True)
class Identity:
    """One pass of one call. `direction`: the name of the pass; `user`: the number of the object it
    is made on; `label`: what the caller calls it; `belongs_to`: for a backward pass, the place of
    its forward call among all calls; `sinks`: whether it has some; `batch`: what it is made on."""

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
    """Compares calls over gloo; the host waits for it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._numbers = np.empty(2, np.int64)
        self._pair = torch.from_numpy(self._numbers)  # the same memory, for the host to look at

    def agrees(self, number: int, look_around: Callable[[float], None]) -> bool:
        """Whether all ranks have this number. `look_around` is called after each second of
        waiting, with the seconds waited so far, and raises if waiting is in vain."""
        self._numbers[:] = number, -number
        work = dist.all_reduce(self._pair, dist.ReduceOp.MAX, self._group, async_op=True)
        begun = monotonic()
        while True:
            try:
                work.wait(_TURN)
                break
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # not ours: the group's own timeout
                    raise
            look_around(monotonic() - begun)
        highest, negative_of_lowest = self._numbers
        return bool(highest == -negative_of_lowest)


class BatchCount:
    """Counts the batches of a session. `current`: the latest; `is_used`: whether a call came after
    it."""

    def __init__(self) -> None:
        self.current = BatchIdentity()
        self.is_used = True
        self._number = 0
        self.count_here()

    def count_here(self) -> None:
        """From now on count the batches of this thread, and of no other."""
        self._thread = get_ident()

    def begin(self) -> int | None:
        """The number of a new batch; None in a thread that is not counted. A batch that turns out
        to be wrong counts too: whoever goes on after the error is at the next."""
        if get_ident() != self._thread:
            return None
        self._number += 1
        self.current, self.is_used = BatchIdentity(self._number), False
        return self._number

    def holds(self, number: int | None, contents: str) -> BatchIdentity:
        identity = BatchIdentity(number, contents)
        if number is not None:
            self.current = identity
        return identity

    def add(self, *tensors: Tensor) -> None:
        """The next call is made on these tensors too."""
        contents = "" if self.is_used else self.current.contents
        number = self.begin()
        if number is None:
            return
        samples = [sample for x in tensors if (sample := _sample(x))]
        if samples:
            contents = _digest(" ".join([contents, *samples]).encode())
        self.holds(number, contents)


def _sample(x: Tensor) -> str:
    """A few numbers of a tensor, in words, where it holds whole ones that are at hand."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in _WHOLE and x.numel()
    modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    if not plain or modes:
        return ""
    places = torch.arange(0, x.numel(), -(-x.numel() // _SAMPLED), device="cpu")
    return _digest(x.detach().take(places).numpy().tobytes())


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
