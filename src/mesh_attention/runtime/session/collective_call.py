"""Whatever ends a call that one rank has entered is told to the others.

Anything can be raised anywhere: a mistake that only one rank makes, Ctrl-C, no memory, the `repr`
of an argument, a keyword that nobody knows. Caught by the caller, it leaves a rank one call behind
the others, and their next calls would look alike. So every entry is a `collective_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import checkpoint

from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.session import Session

P = ParamSpec("P")
R = TypeVar("R")
SessionAndOptions = tuple[Session, CallOptions]

# A checkpoint ends its second forward pass by it, on all ranks, when it has all it needs.
_STOP: Any = getattr(checkpoint, "_StopRecomputationError", ())


def collective_call(
    find: Callable[..., SessionAndOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that ranks call together. `find`: its session and options, from its
    arguments; where it raises, other ranks cannot be told."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call_together(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling():  # the op that it becomes is a collective call
                return function(*args, **kwargs)
            session = entered = None
            try:
                session, options = find(*args, **kwargs)
                if not session.guard.turn.acquire(blocking=False):
                    session.refuse_other_thread()
                entered = session.guard
                entered.enter()
                result = function(*args, **kwargs)
                if entered.crossed is not None:
                    entered.refuse_if_broken()
                return result
            except _STOP:
                raise
            except BaseException as error:
                if session is None:  # ended before it was there, or there is none
                    with suppress(Exception):
                        session, options = find(*args, **kwargs)
                if session is None:
                    raise
                # Before anything else, which may fail in its turn: nothing can be called where
                # the stack is full.
                session.guard.left_by = error.__class__.__name__
                session.tell_of(error, options)
                raise
            finally:
                if entered is not None:
                    entered.compared = False
                    entered.turn.release()

        return call_together

    return decorate


def of_calls(calls: Any, *_: Any, **__: Any) -> SessionAndOptions:
    """For a function that takes an `ObjectCalls` first."""
    return calls.user.session, calls.options


def of_object(self: Any, *_: Any, **__: Any) -> SessionAndOptions:
    """For a method of a `ContextParallel`."""
    return self._calls.user.session, self._calls.options
