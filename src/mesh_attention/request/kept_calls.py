"""Contexts around the code of a checkpoint, so that its recomputation does not attend again.

`Recording` surrounds the forward pass and keeps the results of each call. `Replaying` surrounds the
recomputation and returns them in the same order, without another rank. Among them is `place`, the
number of the call, so the backward pass belongs to the forward call on all ranks. The operator asks
the innermost context (`operators.py`), in eager and in compiled code. In a context a forward pass
leaves no exchanged rows to the backward pass: q, k and v are computed and exchanged again.
`train/keep_attention.py` makes the contexts. Entering them changes `THREAD` and `KEEPING` only.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError

Results = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # out, lse, place, kept rows
Make = Callable[..., Results]  # makes the call, of the inputs of the operator
_CALL, _NEEDS_GRAD = 7, 10  # the places of `call` and `needs_grad` among the operator's inputs


class Held:
    """Keeps a tensor on its device until the backward pass, in which `take` returns it. `take`
    raises if the tensor was changed in place meanwhile."""

    def __init__(self, x: Tensor) -> None:
        # Detached, to keep no autograd graph; as a view, which counts the tensor's writes too.
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
    """A context whose `attend` answers the calls of attention in its thread. It may be entered
    several times, and calls `begin` each time."""

    _outer: AroundAttention | None = None

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        """The results of a call on `inputs` of the operator. By default they come from the context
        around this one; if there is none, `make` makes the call."""
        return make(*inputs) if self._outer is None else self._outer.attend(make, inputs)

    def fault(self) -> MeshAttentionError | None:
        """Why no call may be made in the context, or None; asked before a call is prepared."""
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
    """`on`: some thread is in a context, so calls leave no rows to the backward pass. All threads
    count, since code that is being compiled asks it too and cannot depend on the state of a thread.
    Calls of other threads then leave no rows either: their results are the same."""

    depth, on = 0, False


THREAD, KEEPING = _Thread(), _Keeping()


class Recording(AroundAttention):
    """Around the forward pass of a block. Results are recorded even if gradients are off, as in
    reentrant checkpoints. `hold` makes a `Held` of each result."""

    def __init__(
        self, hold: Callable[[Tensor], Held] = Held, begin: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(begin)
        self._hold = hold
        # Of each call: what it was made with, its place, and its other results.
        self.calls: list[tuple[list[Any], Tensor, list[Held]]] = []

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        out, lse, place, kept = results = super().attend(make, inputs)
        held = [self._hold(_own_memory(x, inputs)) for x in (out, lse, *kept)]
        self.calls.append((_described(inputs), place, held))
        return results


class Replaying(AroundAttention):
    """Around the recomputation of the same block. It may be entered several times."""

    def __init__(self, recording: Recording, begin: Callable[[], None] = lambda: None) -> None:
        super().__init__(begin)
        self._calls = recording.calls

    def __enter__(self) -> None:
        self._remaining = iter(self._calls)
        super().__enter__()

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        now = _described(inputs)
        no_call: tuple[Any, Any, list[Held]] = None, None, []
        before, place, held = next(self._remaining, no_call)
        if before != now:
            was = f"was made with {before}" if before else "was not made"
            raise MeshAttentionError(
                f"a checkpoint that keeps attention calls it with {now} in the recomputation, and "
                f"this call {was} in the forward pass: make the same calls in the same order"
            )
        out, lse, *kept = (_own_memory(x.take(), inputs) for x in held)
        return out, lse, place, kept


def _own_memory(x: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """A copy for compiled code, which may write to the memory of a result after its last use; `x`
    for eager code. Only eager code names a prepared call in the inputs."""
    return x.clone() if inputs[_CALL] is None else x


def _described(inputs: tuple[Any, ...]) -> list[Any]:
    """What a call of the recomputation must have in common with the call in the forward pass."""
    return [
        (*x.shape, x.dtype) if isinstance(x, Tensor) else x
        for index, x in enumerate(inputs)
        if index not in (_CALL, _NEEDS_GRAD)
    ]
