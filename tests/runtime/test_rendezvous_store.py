"""The store of a rendezvous: numbers of its own, and news of a failure."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from mesh_attention.runtime.transport.symmetric_memory import RendezvousStore

SECONDS = timedelta(seconds=20)


def test_ranks_with_different_histories_meet_under_the_same_numbers() -> None:
    shared = HashStore()
    fresh, busy = (RendezvousStore(shared, SECONDS) for _ in range(2))
    # As PyTorch does it: through C++, with numbers that count all exchanges of the process.
    PrefixStore("x", fresh).set("Memory/0/0", "first of rank 0")
    PrefixStore("x", busy).set("Memory/6/1", "first of rank 1")
    PrefixStore("x", fresh).set("Memory/1/0", "second of rank 0")
    busy.wait(["x/Memory/6/0", "x/Memory/7/0"])
    assert busy.get("x/Memory/6/0") == b"first of rank 0"
    assert busy.get("x/Memory/7/0") == b"second of rank 0"
    assert fresh.get("x/Memory/0/1") == b"first of rank 1"


def test_keys_without_a_number_are_left_alone() -> None:
    shared = HashStore()
    store = RendezvousStore(shared, SECONDS)
    store.set("name", b"value")
    assert shared.get("name") == b"value"
    assert store.check(["name"])
    assert store.add("count", 2) == 2


def test_who_waits_is_told_of_a_failure() -> None:
    shared = HashStore()
    waiting, failing = (RendezvousStore(shared, SECONDS) for _ in range(2))
    failing.tell_failure()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank failed"):
        waiting.wait(["Memory/0/1"])
    assert time.monotonic() - begun < 5


def test_nobody_waits_for_ever() -> None:
    store = RendezvousStore(HashStore(), timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="wait timeout"):
        store.wait(["Memory/0/1"])
