"""How computation and communication disturb each other: kernel calls beside transfers in flight.

Transfers are begun, and kernel calls follow each other until the transfers are done. What the
transfers take longer than alone, and what the calls take longer, is what each loses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread

import numpy as np
import torch

from mesh_attention.measure.ranks import Ranks, Work, cuda_event
from mesh_attention.measure.timed_transfers import Begin, done
from mesh_attention.runtime.transport.torch_operations import Works

_MOST_LOST = 0.95
_MOST_CALLS = 2000


@dataclass(frozen=True)
class Lost:
    """Parts of their speed that each side loses."""

    computation: float
    communication: float


def lost_beside(
    ranks: Ranks, call: Work, begin: Begin, *, call_seconds: float, lasting: float
) -> Lost:
    """`begin` starts a transfer; as many follow each other as take about `lasting` seconds alone.
    What each side takes alone is measured right before, in the same way: whole loops, not calls,
    since what comes in between counts on both sides."""
    transfers = _fitting(lasting, _loop(ranks, done(begin), 3) / 3)
    calls = _fitting(lasting, call_seconds)
    moving = _loop(ranks, done(begin), transfers) / transfers
    computing = _loop(ranks, call, calls) / calls
    ranks.wait_for_all()
    both = _on_streams if ranks.is_cuda else _on_threads
    took, made, moved = ranks.average(both(ranks, call, begin, transfers, computing, moving))
    return Lost(_within(1.0 - made * computing / took), _within(1.0 - moved * moving / took))


def _fitting(lasting: float, seconds: float) -> int:
    return max(3, min(200, int(lasting / seconds)))


def _within(part: float) -> float:
    return round(min(max(part, 0.0), _MOST_LOST), 3)


def _loop(ranks: Ranks, work: Work, times: int) -> float:
    """Seconds of so many calls, averaged over ranks."""
    ranks.wait_for_all()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if ranks.is_cuda:
        torch.cuda.synchronize(ranks.device)
    return ranks.average([time.perf_counter() - begin])[0]


def _on_threads(
    ranks: Ranks,
    call: Work,
    begin: Begin,
    transfers: int,
    computing: float,
    moving: float,
) -> tuple[float, float, float]:
    """Seconds that it took, the kernel calls made and the transfers done in them. The next transfer
    begins between two calls, as in the executor."""
    begun = calls = 0
    waiting: Thread | None = None
    start = time.perf_counter()
    while calls < _MOST_CALLS:
        if waiting is None or not waiting.is_alive():
            if begun == transfers:
                break
            # gloo's messages are not known to be done until somebody has waited for them.
            waiting = Thread(target=_wait, args=(begin(),))
            waiting.start()
            begun += 1
        call()
        calls += 1
    moved = begun - (calls == _MOST_CALLS)
    took = time.perf_counter() - start
    if waiting is not None:
        waiting.join()
    for _ in range(transfers - begun):  # other ranks wait for them
        _wait(begin())
    return took, float(calls), float(moved)


def _wait(works: Works) -> None:
    for work in works:
        work.wait()


def _on_streams(
    ranks: Ranks,
    call: Work,
    begin: Begin,
    transfers: int,
    computing: float,
    moving: float,
) -> tuple[float, float, float]:
    """The same on a GPU: calls for three times as long as the transfers take alone. What was done
    is counted until the first side was through, as the other had no company from then on."""
    device = ranks.device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    calls = max(3, min(_MOST_CALLS, int(3 * transfers * moving / computing)))
    first = cuda_event()
    ends = [cuda_event() for _ in range(transfers)]
    marks = [cuda_event() for _ in range(calls)]
    first.record()
    stream.wait_event(first)
    with torch.cuda.stream(stream):
        for end in ends:
            _wait(begin())
            end.record(stream)
    for mark in marks:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    moving_until, calling_until = (
        [first.elapsed_time(one) * 1e-3 for one in events] for events in (ends, marks)
    )
    took = min(moving_until[-1], calling_until[-1])
    return took, done_by(took, calling_until), done_by(took, moving_until)


def done_by(seconds: float, ends: Sequence[float]) -> float:
    """How many of those that follow each other and end then, with the part of the one begun."""
    return float(np.interp(seconds, [0.0, *ends], range(len(ends) + 1)))
