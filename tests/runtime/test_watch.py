"""The thread that watches calls on a device, with numbers that the tests write for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from mesh_attention.runtime.agreement import watch
from mesh_attention.runtime.agreement.identity import AgreedKind, Identity
from mesh_attention.runtime.agreement.watch import Watch

LIMIT = timedelta(seconds=60)
SOON = 5.0


class Comparison:
    """Stands for what the device writes: the first wrong call, and the last that is over."""

    def __init__(self) -> None:
        self.status = np.zeros(2, dtype=np.int64)
        self.different: set[int] = set()

    def begin(self, number: int, place: int, *, captured: bool) -> None:
        pass

    def differs(self, place: int) -> bool:
        return place in self.different


class Owner:
    """Writes down what the thread finds."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        comparison: Any = self.comparison
        self.differences: list[tuple[int, Identity]] = []
        self.faults: list[Identity] = []
        self.was_told = threading.Event()
        self.watch = Watch(comparison, self.find_difference, self.find_fault)

    def find_difference(self, place: int, identity: Identity) -> None:
        self.differences.append((place, identity))
        self.was_told.set()

    def find_fault(self, identity: Identity, timeout: timedelta, waited: float) -> bool:
        self.faults.append(identity)
        self.was_told.set()
        return True


def call(label: str) -> Identity:
    return Identity(AgreedKind({}), "forward", 0, label)


CALLS = {place: call(f"call {place}") for place in (1, 2, 3)}


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(watch, "_TURN_SECONDS", 0.001)
    monkeypatch.setattr(watch, "_LOOK_AROUND_SECONDS", 0.02)
    watched = Owner()
    yield watched
    watched.watch.stop()
    watched.watch._thread.join(SOON)
    assert not watched.watch._thread.is_alive()


def test_the_call_that_the_device_found_wrong_is_looked_into_and_no_other(owner: Owner) -> None:
    owner.comparison.status[0] = 2
    for place, identity in CALLS.items():
        owner.watch._launched.append(watch._Launched(place, identity, LIMIT, 0.0))
    owner.watch._awake.set()
    assert owner.was_told.wait(SOON)
    assert owner.differences == [(2, CALLS[2])]
    owner.watch.wait_for_verdict(SOON)
    assert not owner.watch._thread.is_alive()
    assert (owner.differences, owner.faults) == ([(2, CALLS[2])], [])  # no second time


def test_a_call_that_never_ends_is_found_by_its_comparison(owner: Owner) -> None:
    owner.comparison.different = {3}
    for place, identity in CALLS.items():
        owner.watch.begin(identity, place, LIMIT)
    assert owner.was_told.wait(SOON)
    owner.watch._thread.join(SOON)
    assert not owner.watch._thread.is_alive()
    assert (owner.differences, owner.faults) == ([(3, CALLS[3])], [])


def test_calls_that_are_over_are_watched_no_longer_and_the_first_other_is_asked_about(
    owner: Owner,
) -> None:
    owner.comparison.status[1] = 1
    for place in (1, 2):
        owner.watch.begin(CALLS[place], place, LIMIT)
    assert owner.was_told.wait(SOON)
    assert owner.faults == [CALLS[2]]
    assert owner.differences == []


def test_what_is_spoilt_already_is_left_alone(owner: Owner) -> None:
    owner.comparison.status[0] = -1
    owner.watch.begin(CALLS[1], 1, LIMIT)
    owner.watch._thread.join(SOON)
    assert not owner.watch._thread.is_alive()
    assert (owner.differences, owner.faults) == ([], [])


def test_a_thread_without_calls_to_watch_sleeps(owner: Owner) -> None:
    owner.comparison.status[1] = 1
    owner.watch.begin(CALLS[1], 1, LIMIT)
    limit = time.monotonic() + SOON
    while owner.watch._awake.is_set() and time.monotonic() < limit:
        time.sleep(0.001)
    for _ in range(10):
        time.sleep(0.005)
        assert not owner.watch._awake.is_set()
