"""`collective_call`: an error that ends a call on one rank is told to the other ranks.

Any line may raise: a mistake of one rank, Ctrl-C, lack of memory, the `repr` of an argument. If the
caller catches the error, this rank is one call behind the others, whose next calls would look like
its own. So every function that ranks call together is decorated with `collective_call`.
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

# No error: activation checkpointing raises it on all ranks to end a recomputation early.
_STOP: Any = getattr(checkpoint, "_StopRecomputationError", ())


def collective_call(
    find: Callable[..., SessionAndOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that ranks call together. `find` takes the function's arguments and
    returns its session and options; if it raises, other ranks cannot be told."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call_together(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling():  # the traced operator is a collective call
                return function(*args, **kwargs)
            session = guard = None
            try:
                session, options = find(*args, **kwargs)
                if not session.guard.turn.acquire(blocking=False):
                    session.refuse_other_thread()
                guard = session.guard
                guard.enter()
                result = function(*args, **kwargs)
                if guard.crossed is not None:
                    guard.refuse_if_broken()
                return result
            except _STOP:
                raise
            except BaseException as error:
                if session is None:  # Ctrl-C in `find`, or `find` raised and will again
                    with suppress(Exception):
                        session, options = find(*args, **kwargs)
                if session is None:
                    raise
                # First of all, without a call: on a full stack calls fail. The next call tells it.
                session.guard.left_by = error.__class__.__name__
                session.tell_of(error, options)
                raise
            finally:
                if guard is not None:
                    guard.compared = False
                    guard.turn.release()

        return call_together

    return decorate


def of_calls(calls: Any, *_: Any, **__: Any) -> SessionAndOptions:
    """`find` for a function whose first argument is an `ObjectCalls`."""
    return calls.user.session, calls.options


def of_object(self: Any, *_: Any, **__: Any) -> SessionAndOptions:
    """`find` for a method of a `ContextParallel`."""
    return self._calls.user.session, self._calls.options
