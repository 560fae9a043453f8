"""Transfers to be timed, and what transfers and kernel calls lose beside each other.

The calls are those that the runtime makes, on tensors that hold nothing. `links.py` times transfers
alone. For interference (`lost_beside`) transfers are begun, and kernel calls follow each other
until the transfers are done: what either side takes longer than alone is what it loses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread

import numpy as np
import torch
from torch import Tensor

from mesh_attention.measure.ranks import Ranks, Work, cuda_event
from mesh_attention.runtime.device import transfer_stream
from mesh_attention.runtime.transport.distributed import (
    CollectiveRows,
    gather,
    gathers_by_messages,
    reduce,
    reduce_by_messages,
)
from mesh_attention.runtime.transport.exchange import Exchange, Messages, Works
from mesh_attention.runtime.transport.groups import Groups

Begin = Callable[[], Works]  # begins a transfer
_MOST_LOST = 0.95
_MOST_CALLS = 2000


class TimedTransfers:
    """Makes the transfers to be timed, on process groups as the runtime makes them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._groups = ranks, Groups(ranks.group)
        self._over_gloo = ranks.backend != "nccl"
        self._everybody = self._groups.everybody()

    def _tensor(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes // 4, device=self._ranks.device)

    def collective(self, kind: str, members: Sequence[int], part_bytes: int) -> Begin:
        """Members that have none yet make their group: all of them call this, in one order."""
        size, group = len(members), self._groups.of([self._groups.ranks[m] for m in members])
        gathers = kind == "all-gather"
        if gathers and gathers_by_messages(size, host_driven=self._over_gloo):
            return self.all_to_all(members, part_bytes)
        part, whole = self._tensor(part_bytes), self._tensor(size * part_bytes)
        call = gather if gathers else reduce_by_messages if self._over_gloo else reduce
        rows = CollectiveRows(part, whole, group, range(size))
        return _begin(partial(call, rows))

    def messages(self, peers: Sequence[tuple[int, bool]], part_bytes: int) -> Begin:
        """One message for each peer: (rank, whether it is sent or received)."""
        messages = [
            Messages(self._tensor(part_bytes), (self._groups.ranks[peer],), None, 0, sent)
            for peer, sent in peers
        ]
        return _begin(Exchange(self._everybody, host_driven=self._over_gloo).ready(messages))

    def all_to_all(self, members: Sequence[int], part_bytes: int) -> Begin:
        others = [m for m in members if m != self._ranks.rank]
        return self.messages([(m, sent) for m in others for sent in (True, False)], part_bytes)


def _begin(start: Callable[[Works, list[Callable[[], object]]], None]) -> Begin:
    def begin() -> Works:
        works: Works = []
        start(works, [])
        return works

    return begin


def done(begin: Begin) -> Work:
    """A transfer from its beginning to its end, as seen by this rank."""
    return lambda: _wait(begin())


def _wait(works: Works) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Lost:
    """The parts of their speed that the two sides lose."""

    computation: float
    communication: float


def lost_beside(
    ranks: Ranks, call: Work, begin: Begin, *, call_seconds: float, lasting: float
) -> Lost:
    """`begin` starts a transfer; as many follow each other as take about `lasting` seconds alone.
    Each side alone is measured right before, in the same way: whole loops and not calls, since the
    gaps between calls count on both sides."""
    transfers = _fitting(lasting, _loop(ranks, done(begin), 3) / 3)
    calls = _fitting(lasting, call_seconds)
    moving = _loop(ranks, done(begin), transfers) / transfers
    computing = _loop(ranks, call, calls) / calls
    ranks.wait_for_all()
    if ranks.is_cuda:
        most = max(3, min(_MOST_CALLS, int(3 * transfers * moving / computing)))
        beside = _on_streams(ranks.device, call, begin, transfers, most)
    else:
        beside = _on_threads(call, begin, transfers)
    took, made, moved = ranks.average(beside)
    return Lost(_within(1.0 - made * computing / took), _within(1.0 - moved * moving / took))


def _fitting(lasting: float, seconds: float) -> int:
    return max(3, min(200, int(lasting / seconds)))


def _within(part: float) -> float:
    return round(min(max(part, 0.0), _MOST_LOST), 3)


def _loop(ranks: Ranks, work: Work, times: int) -> float:
    """Seconds of so many calls, averaged over ranks."""

    def calls() -> None:
        for _ in range(times):
            work()

    return ranks.average([ranks.timed(calls)[1]])[0]


def _on_threads(call: Work, begin: Begin, transfers: int) -> tuple[float, float, float]:
    """Seconds, and the kernel calls and transfers done in them. The next transfer begins between
    two calls, as in the executor."""
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


def _on_streams(
    device: torch.device, call: Work, begin: Begin, transfers: int, calls: int
) -> tuple[float, float, float]:
    """The same on a GPU, with calls for three times as long as the transfers take alone. Work is
    counted until the first side is through, as the other is alone from then on."""
    stream = transfer_stream(device)
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
        [first.elapsed_time(event) * 1e-3 for event in events] for events in (ends, marks)
    )
    took = min(moving_until[-1], calling_until[-1])
    return took, done_by(took, calling_until), done_by(took, moving_until)


def done_by(seconds: float, ends: Sequence[float]) -> float:
    """The number of calls or transfers done by `seconds`, with the part of the next; `ends` are the
    times at which they end."""
    return float(np.interp(seconds, [0.0, *ends], range(len(ends) + 1)))
