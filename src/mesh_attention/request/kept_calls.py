"""Contexts around the code of a checkpoint, so that its recomputation does not attend again.

`Recording` surrounds the forward pass and holds the results of each attention. `Replaying`
surrounds the recomputation and hands them out in the same order: no other rank is asked. `place` is
a result too, so the backward pass belongs to the forward call, on all ranks alike. The operator
asks the innermost context (`operators.py`), so eager and compiled code are served alike. Meanwhile
no rows are kept for the backward pass: q, k and v are computed again, and exchanged again.
`train/keep_attention.py` makes the contexts.
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
    """A context that answers the calls of attention in its thread. `begin` is called whenever it is
    entered, which may happen several times."""

    _outer: AroundAttention | None = None

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        """The results of a call on `inputs`, those of the operator; `make` makes the call. By
        default what the context around this one answers, or the call."""
        return make(*inputs) if self._outer is None else self._outer.attend(make, inputs)

    def fault(self) -> MeshAttentionError | None:
        """Why nothing may attend in the context; asked before a call is prepared."""
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
    """Whether calls keep no rows for the backward pass, because a context is entered in any thread.
    Code that is being compiled asks it too, and can depend on no state of a thread: at worst the
    code of another thread keeps nothing, which is right too."""

    depth, on = 0, False


THREAD, KEEPING = _Thread(), _Keeping()


class Recording(AroundAttention):
    """Around the forward pass of a block. Results are recorded also where gradients are off, as in
    reentrant checkpoints. `hold` makes what keeps a result until the backward pass."""

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
    """Around the recomputation of the same block, which may come several times."""

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
