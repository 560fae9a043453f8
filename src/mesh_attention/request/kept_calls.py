"""Attention that a checkpoint does not repeat: results of its forward pass stand in for the call.

A context around the code of a checkpoint holds the results of each call in the forward pass, and
hands them out in the same order in the recomputation: no other rank is asked. `place` is a result
too, so the backward pass belongs to the forward call, on all ranks alike. This stands below the
operator, where eager and compiled code meet it. Rows that a forward pass would keep for the
backward pass are not kept meanwhile: q, k and v are computed again, and exchanged again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError

Results = tuple[Tensor, Tensor, Tensor, list[Tensor]]
Make = Callable[..., Results]
_CALL, _NEEDS_GRAD = 7, 10  # among the inputs of the operator


class Held:
    """A tensor that waits for the backward pass where it is; refused if it changes meanwhile."""

    def __init__(self, x: Tensor) -> None:
        # Not the tensor itself, on which autograd hangs its graph; but with its version.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = x.detach()
        self._version = x._version

    def take(self) -> Tensor:
        if self._tensor._version != self._version:
            raise MeshAttentionError(
                "a tensor that a checkpoint keeps (the result of attention, or an input of the "
                "block) was changed in place before its backward pass; make a new tensor instead"
            )
        return self._tensor.detach()


class AroundAttention:
    """A context in which calls of this thread are its own to answer. `begin`: when it is entered,
    which may be again and again."""

    _outer: AroundAttention | None = None

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        """By default as without it, or as what stands around it says."""
        return make(*inputs) if self._outer is None else self._outer.attend(make, inputs)

    def fault(self) -> MeshAttentionError | None:
        """Why nothing may attend in it; asked before a call is prepared."""
        return None if self._outer is None else self._outer.fault()

    def __enter__(self) -> None:
        self._begin()
        self._outer, THREAD.innermost = THREAD.innermost, self
        KEEPING.depth += 1
        KEEPING.on = True

    def __exit__(self, *_: object) -> None:
        THREAD.innermost, self._outer = self._outer, None
        KEEPING.depth -= 1
        KEEPING.on = KEEPING.depth > 0


class _Thread(local):
    innermost: AroundAttention | None = None


class _Keeping:
    """Whether calls are to keep nothing but shards: also asked by code that is being compiled. Of
    all threads, since such code can depend on no other: at worst another thread's code is compiled
    for shards, which is right too."""

    depth, on = 0, False


THREAD, KEEPING = _Thread(), _Keeping()


class Recording(AroundAttention):
    """The forward pass of a block: results are recorded for a backward pass, although gradients may
    be off, as in reentrant checkpoints. `hold`: how a result waits for the backward pass."""

    def __init__(
        self, hold: Callable[[Tensor], Held] = Held, begin: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(begin)
        self._hold = hold
        self.calls: list[tuple[list[Any], Tensor, list[Held]]] = []

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        out, lse, place, kept = results = super().attend(make, inputs)
        held = [self._hold(_own_memory(x, inputs)) for x in (out, lse, *kept)]
        self.calls.append((_described(inputs), place, held))
        return results


class Replaying(AroundAttention):
    """Its recomputation, as often as it comes."""

    def __init__(self, recording: Recording, begin: Callable[[], None] = lambda: None) -> None:
        super().__init__(begin)
        self._calls = recording.calls

    def __enter__(self) -> None:
        self._coming = iter(self._calls)
        super().__enter__()

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        now = _described(inputs)
        nothing: tuple[Any, Any, list[Held]] = None, None, []
        before, place, held = next(self._coming, nothing)
        if before != now:
            was = f"was made with {before}" if before else "was not made"
            raise MeshAttentionError(
                f"a checkpoint that keeps attention calls it with {now} in the recomputation, and "
                f"this call {was} in the forward pass: make the same calls in the same order"
            )
        out, lse, *kept = (_own_memory(x.take(), inputs) for x in held)
        return out, lse, place, kept


def _own_memory(x: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """Compiled code, which names no prepared call, may write to memory that it needs no more."""
    return x.clone() if inputs[_CALL] is None else x


def _described(inputs: tuple[Any, ...]) -> list[Any]:
    """What a call must have in common with its first time."""
    return [
        (*x.shape, x.dtype) if isinstance(x, Tensor) else x
        for place, x in enumerate(inputs)
        if place not in (_CALL, _NEEDS_GRAD)
    ]
