"""Which batch a call is made on: calls of two batches look alike, and a rank that has left out a
batch would mix its tokens with those of another.

`shard_batch` gives every batch a number and says what it holds; the batch, its documents and its
labels keep both. Whatever is cut by `shard` or described by `documents` has a number too, and goes
with the calls that follow. Loaders run ahead, on each rank by as much as they like: so batches are
counted in one thread, that which made the first object, and others are known by what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from threading import get_ident

import torch
from torch import Tensor

_SAMPLED = 64  # numbers of a tensor
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """`number`: None where it was made in another thread; `contents`: in words."""

    number: int | None = 0
    contents: str = ""


OF_FORWARD_CALL = BatchIdentity()  # a backward pass has the batch of that


class BatchCount:
    """The batches of a session. `current`: the latest; `is_used`: whether a call came after it."""

    def __init__(self) -> None:
        self.current = BatchIdentity()
        self.is_used = True
        self._number = 0
        self.count_here()

    def count_here(self) -> None:
        """In this thread."""
        self._thread = get_ident()

    def begin(self) -> int | None:
        """The number of a new batch. One that turns out to be wrong counts too: whoever goes on
        after the error is at the next."""
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
        """To what the next call is made on."""
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
