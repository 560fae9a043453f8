"""Whatever ends a call that one rank has entered is told to the others.

Anything can be raised anywhere: a mistake that only one rank makes, Ctrl-C, no memory, the `repr`
of an argument, a keyword that nobody knows. Caught by the caller, it leaves a rank one call behind
the others, and their next calls would look alike. So every entry is in `told_to_all`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import checkpoint

from mesh_attention.runtime.session.context import Context
from mesh_attention.runtime.session.prepared_call import CallOptions

P = ParamSpec("P")
R = TypeVar("R")
Found = tuple[Context, CallOptions]

# A checkpoint ends its second forward pass by it, on all ranks, when it has all it needs.
_STOP: Any = getattr(checkpoint, "_StopRecomputationError", ())


def told_to_all(find: Callable[..., Found]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of a function that ranks call together. `find`: its context and options, from its
    arguments; where it has none, nobody can be told."""

    def told(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling():  # the op that it becomes is told
                return function(*args, **kwargs)
            found = None
            try:
                found = find(*args, **kwargs)
                found[0].guard.enter()
                result = function(*args, **kwargs)
                found[0].guard.leave()
                return result
            except _STOP:
                if found is not None:
                    found[0].guard.leave()
                raise
            except BaseException as error:
                if found is None:  # ended before it was there, or there is none
                    with suppress(Exception):
                        found = find(*args, **kwargs)
                if found is None:
                    raise
                # Before anything else, which may fail in its turn: nothing can be called where
                # the stack is full.
                found[0].guard.left_by = error.__class__.__name__
                found[0].tell_of(error, found[1])
                raise

        return called

    return told


def of_object(self: Any, *_: Any, **__: Any) -> Found:
    """A method of a `ContextParallel`, or a function that takes one first."""
    return self._share.context, self._options
