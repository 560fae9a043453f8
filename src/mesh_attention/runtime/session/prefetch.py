"""The next batch is made ready while this one is computed: choices, plans, masks on the device.

A thread of the trainer's process does it, one batch ahead, for the kinds of call that the last
batch was used for. Where it fails nothing is kept: the call itself then meets the same error, and
tells all ranks.

On a GPU it works on a stream of its own, since kernels that make a plan of a mask read sizes back
to the host, which would wait for everything before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from threading import Thread
from typing import TypeVar

from mesh_attention.runtime.session.documents import Documents

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch], make: Callable[[Batch], Documents]
) -> Iterator[tuple[Batch, Documents]]:
    """Every batch with its documents; the next one of the loader is taken and made ready
    meanwhile."""
    end = object()
    batches = chain(loader, [end])

    def take(like: Documents | None) -> tuple[Batch, Documents] | None:
        batch = next(batches)
        if batch is end:
            return None
        documents = make(batch)  # type: ignore[arg-type]
        if like is not None:
            with suppress(Exception):  # the call meets it again, and tells all ranks
                documents.make_ready_like(like)
        return batch, documents  # type: ignore[return-value]

    used: Documents | None = None
    coming = _begin(take, None)
    while (found := coming.result()) is not None:
        # Nobody knows yet what this batch will be used for; the one before was used.
        coming = _begin(take, used)
        yield found
        used = found[1]


def _begin(
    take: Callable[[Documents | None], tuple[Batch, Documents] | None], like: Documents | None
) -> Future[tuple[Batch, Documents] | None]:
    """In a thread that nobody waits for: whoever leaves the loop need not wait for a loader."""
    coming: Future[tuple[Batch, Documents] | None] = Future()

    def work() -> None:
        try:
            coming.set_result(take(like))
        except BaseException as error:
            coming.set_exception(error)

    Thread(target=work, name="mesh_attention prefetch", daemon=True).start()
    return coming
