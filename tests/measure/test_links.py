"""What `profile` makes of its samples, with numbers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch

from mesh_attention.measure.links import Sample, nics_of
from mesh_attention.measure.ranks import Ranks, Work
from mesh_attention.measure.transfers import _MOST_CALLS, _on_threads, done_by

KIB = 1 << 10


def samples(kind: str, *seconds: float) -> list[Sample]:
    """At 16 KiB, 128 KiB and so on."""
    return [Sample(kind, 2, (16 << 3 * at) * KIB, x) for at, x in enumerate(seconds)]


@pytest.mark.parametrize(("together", "nics"), [(0.4, 1), (0.2, 2), (0.105, 4)])
def test_what_ranks_lose_by_each_other_says_how_many_nics_they_share(
    together: float, nics: int
) -> None:
    assert nics_of(4, samples("gather", 0.0, 0.1), samples("gather", 0.0, together)) == nics


def test_a_size_that_only_some_kinds_were_measured_at_is_compared_for_those() -> None:
    """Reductions are left out at large sizes once they are slow, as they are where all ranks reduce
    at once: what one rank took for them is then no sign of a NIC for each."""
    alone = [*samples("gather", 0.01, 0.1), *samples("reduction", 0.03, 0.3)]
    together = [*samples("gather", 0.04, 0.4), *samples("reduction", 0.12)]
    assert nics_of(4, alone, together) == 1


class OtherIsLate(Ranks):
    """One rank of two that leave a transfer one after the other: the first by what it measured, the
    other always so much later."""

    def wait_for_all(self) -> None: ...

    def average(self, numbers: Sequence[float]) -> list[float]:
        return [number + 0.5 for number in numbers]

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        return [number + 1.0 for number in numbers]

    def _elapsed(self, work: Work, repeats: int) -> list[float]:
        return [3.0, 4.0, 4.0][:repeats]


def test_a_transfer_takes_until_its_last_rank_is_done() -> None:
    """3 seconds and then 4 for the one, and a second more in the first for the other: the mean of
    both would have links faster than they are."""
    nobody: Any = None
    ranks = OtherIsLate(nobody, 0, 2, 2, torch.device("cpu"))
    assert ranks.seconds(lambda: None, lasting=12.0, members=2) == 4.0
    assert ranks.seconds(lambda: None, lasting=12.0) == 4.5


class Message:
    """As gloo's: it is not completed until somebody has waited for it."""

    waited = 0

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        Message.waited += 1


def test_messages_beside_calls_end_though_gloo_does_not_say_so() -> None:
    _, calls, moved = _on_threads(partial(sleep, 1e-3), lambda: [Message()], 5)
    assert moved == Message.waited == 5
    assert calls < _MOST_CALLS


def test_calls_and_transfers_that_have_begun_count_by_their_part() -> None:
    ends = [1.0, 2.0, 4.0]
    assert [done_by(at, ends) for at in (0.5, 2.0, 3.0, 9.0)] == [0.5, 2.0, 2.5, 3.0]
