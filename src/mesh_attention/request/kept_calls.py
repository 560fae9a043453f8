"""Attention that a checkpoint does not repeat: results of its forward pass stand in for the call.

Around the code of a checkpoint stands a context: in the forward pass it holds the results of each
call, in the recomputation it hands them out in the same order, and asks no other rank. A call that
is not repeated has no place of its own among the calls: `place` is a result too, so its backward
pass belongs to the forward call, on all ranks alike. This stands below the operator: eager and
compiled code meet it, whatever else looks at operators.

Rows that a forward pass would keep for the backward pass are not kept meanwhile: q, k and v are
computed again, and exchanged again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import local
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError

Results = tuple[Tensor, Tensor, Tensor, list[Tensor]]
Make = Callable[..., Results]


class Held(Protocol):
    """A tensor that waits for the backward pass."""

    def take(self) -> Tensor: ...


class HeldHere:
    """A tensor that stays where it is; refused if its memory was written to meanwhile."""

    def __init__(self, x: Tensor) -> None:
        # Not the tensor itself, on which autograd hangs its graph; but with its version.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor = x.detach()
        self._version = x._version

    def take(self) -> Tensor:
        if self._tensor._version != self._version:
            raise MeshAttentionError(
                "a tensor that a checkpoint keeps was changed in place before its backward pass "
                "(the result of attention, or an input of the block); use an operation that makes "
                "a new tensor"
            )
        return self._tensor.detach()


class AroundAttention(AbstractContextManager["AroundAttention"]):
    """What stands around calls of this thread, in place of whatever did before."""

    _outer: AroundAttention | None = None

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        raise NotImplementedError

    def __enter__(self) -> AroundAttention:
        self._outer, _THREAD.innermost = _THREAD.innermost, self
        _KEEPING.depth += 1
        _KEEPING.on = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _THREAD.innermost, self._outer = self._outer, None
        _KEEPING.depth -= 1
        _KEEPING.on = _KEEPING.depth > 0


class _Thread(local):
    innermost: AroundAttention | None = None


class _Keeping:
    """Of all threads, since compiled code can depend on no other: at worst another thread's code is
    compiled for shards, which is right too."""

    depth, on = 0, False


_THREAD, _KEEPING = _Thread(), _Keeping()


def keeps_shards() -> bool:
    """Whether calls are to keep nothing but shards: also asked by code that is being compiled."""
    return _KEEPING.on


def backward_follows() -> bool:
    """Whether results are recorded for a backward pass, although gradients may be off: reentrant
    checkpoints have none in their forward pass."""
    return isinstance(_THREAD.innermost, Recording)


def attend_once(make: Make, inputs: tuple[Any, ...]) -> Results:
    """What `make` makes of the inputs of the operator, or has made of them before."""
    around = _THREAD.innermost
    return make(*inputs) if around is None else around.attend(make, inputs)


@dataclass(frozen=True)
class _KeptCall:
    description: dict[str, Any]
    results: tuple[Held, Held]  # out and lse
    place: Tensor
    kept: list[Held]  # rows, by a plan that the caller brings and that keeps some


class KeptCalls:
    """The attention calls of one checkpointed block, in their order. `hold`: how a result waits for
    the backward pass."""

    def __init__(self, hold: Callable[[Tensor], Held] = HeldHere) -> None:
        self.hold = hold
        self.calls: list[_KeptCall] = []


class Recording(AroundAttention):
    def __init__(self, block: KeptCalls) -> None:
        self._block = block

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        results = _from_outside(self._outer, make, inputs)
        out, lse, place, kept = results
        held = [self._block.hold(_own_memory(x, inputs)) for x in (out, lse, *kept)]
        call = _KeptCall(_description(inputs), (held[0], held[1]), place, held[2:])
        self._block.calls.append(call)
        return results


class Replaying(AroundAttention):
    def __init__(self, block: KeptCalls) -> None:
        self._block = block

    def __enter__(self) -> AroundAttention:
        self._number = 0
        return super().__enter__()

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        number, description = self._number, _description(inputs)
        known = self._block.calls[number : number + 1]
        if not known or known[0].description != description:
            before = f"with {known[0].description}" if known else "not made"
            raise MeshAttentionError(
                f"call {number} of attention in a checkpoint that keeps it is made with "
                f"{description} in the recomputation, and was {before} in the forward pass: the "
                "block must make the same calls in the same order both times"
            )
        self._number += 1
        out, lse = (_own_memory(x.take(), inputs) for x in known[0].results)
        kept = [_own_memory(x.take(), inputs) for x in known[0].kept]
        return out, lse, known[0].place, kept


def _from_outside(around: AroundAttention | None, make: Make, inputs: tuple[Any, ...]) -> Results:
    """Checkpoints may be nested: what is inside one that is computed again is made by it."""
    return make(*inputs) if around is None else around.attend(make, inputs)


def _own_memory(x: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """Compiled code, which names no prepared call, may write to memory that it needs no more."""
    return x.clone() if inputs[7] is None else x


def _description(inputs: tuple[Any, ...]) -> dict[str, Any]:
    q, k, v, sinks, documents, _, name, _, _, return_lse, _, text, number, scale, causal, _ = inputs
    return {
        "shapes": [tuple(x.shape) for x in (q, k, v)],
        "dtype": q.dtype,
        "object": name,
        "label": number if text is None else text,
        "documents": None if documents is None else int(documents),
        "sinks": sinks is not None,
        "return_lse": return_lse,
        "scale": scale,
        "is_causal": causal,
    }
