"""The job's key-value store with a time limit on every question; agreement and groups ask it.

The process that keeps it (rank 0 of the job, or the launcher) may end, or be stopped and never
answer. PyTorch's client then waits in the system without any limit, so every question is asked in a
thread of its own, which is left behind where no answer comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mesh_attention.errors import MeshAttentionError, printable

ANSWER_SECONDS = 3.0  # after a fault, for others to say that they are there
_MOST_CHARACTERS = 10_000  # of what a peer says

Answer = TypeVar("Answer")


class LostStoreError(MeshAttentionError):
    """The job's key-value store does not answer."""


@contextmanager
def asking_the_store() -> Iterator[None]:
    """Around every use of the store."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
        raise _lost("has probably ended", str(error).splitlines()[0]) from error


def in_thread(name: str, work: Callable[[], Answer]) -> tuple[Future[Answer], threading.Thread]:
    """Does `work` in a thread that can be left behind. Returns its result, and the thread."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name=f"mesh_attention {name}", daemon=True)
    thread.start()
    return answer, thread


def in_time(
    work: Callable[[], Answer], seconds: float, left: list[threading.Thread] | None = None
) -> Answer:
    """The result of `work`, which asks the store; `left` gets the thread if it does not return."""
    answer, thread = in_thread("store", work)
    thread.join(seconds)
    if answer.done():
        return answer.result()
    if left is not None:
        left.append(thread)
    raise _lost("has probably been stopped", f"no answer within {seconds:.0f} s")


def _lost(what: str, seen: str) -> LostStoreError:
    return LostStoreError(
        "the key-value store of the job does not answer: the process that keeps it (rank 0 of the "
        f"job, or the launcher) {what} ({seen})"
    )


def as_words(said: bytes) -> str:
    """What a peer says, as it can be printed: another program, or an exception of the peer's, may
    have any characters, and any number of them."""
    text = said.decode(errors="replace")
    more = len(text) - _MOST_CHARACTERS
    text = printable(text[:_MOST_CHARACTERS])
    return f"{text} ... ({more} more characters)" if more > 0 else text


def as_number(said: bytes) -> int:
    """0 if it is none."""
    return int(said) if said.isdigit() else 0


def wait_for(store: Store, keys: Iterable[str], timeout: timedelta, failed: str = "") -> None:
    """As `store.wait`, which lets no other thread ask the store meanwhile: two threads that each
    make a process group could wait for each other, over two ranks. `failed`: a key that says that
    the others will never come."""
    until, pause = monotonic() + timeout.total_seconds(), 0.0005
    for key in keys:
        while not store.check([key]):
            if failed and store.check([failed]):
                raise RuntimeError("another rank failed in the rendezvous")
            if monotonic() > until:
                raise dist.DistStoreError(f"wait timeout after {timeout}, for the key {key}")
            sleep(pause)
            pause = min(2 * pause, 0.1)


class PatientStore(Store):
    """The job's store for what waits in C++, as a rendezvous of gloo. It must be held for as long
    as that may ask it."""

    failed = ""  # the key by which a member says that it has failed

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._limit = store, timeout

    def _key(self, key: str) -> str:
        return key

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._key(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def add(self, key: str, number: int) -> int:
        return self._store.add(self._key(key), number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_for(self._store, map(self._key, keys), timeout or self._limit, self.failed)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._key(key))


def forget(store: Store, key: str) -> None:
    """Remove a key that nobody reads any more; not every store can."""
    with suppress(RuntimeError, NotImplementedError):
        store.delete_key(key)


class JobStore:
    """The keys under `prefix`. Once a question had no answer all others are refused at once, until
    the answer comes."""

    def __init__(self, prefix: str, store: Store, seconds: float = ANSWER_SECONDS) -> None:
        self._store = PrefixStore(prefix, store)
        self._unanswered: list[threading.Thread] = []
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """Wait so long for answers from now on, in all. A question after that, or shortly before,
        has `ANSWER_SECONDS`."""
        self._until = monotonic() + seconds

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def there(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Those of the keys that are there, with their values."""
        return self._ask(lambda: {k: self._store.get(k) for k in keys if self._store.check([k])})

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, expected, value))

    def add(self, key: str, number: int) -> int:
        return self._ask(lambda: self._store.add(key, number))

    def forget(self, keys: Iterable[str]) -> None:
        """Remove keys that nobody reads any more; not every store can."""

        def remove() -> None:
            for key in keys:
                forget(self._store, key)

        self._ask(remove)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if any(thread.is_alive() for thread in self._unanswered):
            raise _lost("has probably been stopped", "earlier questions have no answer yet")
        self._unanswered.clear()
        seconds = max(self._until - monotonic(), ANSWER_SECONDS)
        with asking_the_store():
            return in_time(question, seconds, self._unanswered)
