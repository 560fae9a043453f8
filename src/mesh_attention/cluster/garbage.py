"""Python's search for garbage, put off while there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A simulation makes hundreds of thousands of small objects, none of them garbage: looking for
    it takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
