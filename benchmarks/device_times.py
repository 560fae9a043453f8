"""How long work on a CUDA device takes: one call at a time, and calls that follow each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

Pass = Callable[[], object]
_AHEAD = 3  # calls of which no time is taken


def need_cuda() -> None:
    """Ends a script that has nothing to measure on."""
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a CUDA GPU, and torch {torch.__version__} finds none")


def milliseconds(work: Pass, repeats: int) -> float:
    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(float(begin.elapsed_time(end)))
    return statistics.median(found)


def in_turns(works: Mapping[str, Pass], rounds: int = 7, calls: int = 10) -> dict[str, float]:
    """Milliseconds of a call, where calls follow each other; turn by turn, so that all are as hot
    as the others. A few calls come first, so that none of the others waits for the host to begin,
    unless the host takes longer than the device."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):  # the first turn warms them up
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            for at in range(_AHEAD + calls):
                if at == _AHEAD:
                    begin.record()
                work()
            end.record()
            torch.cuda.synchronize()
            if number:
                found[name].append(float(begin.elapsed_time(end)) / calls)
    return {name: statistics.median(times) for name, times in found.items()}
