"""Batches are numbered in one thread: the one in which the first user of a session joined."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mesh_attention.runtime.agreement.identity import BatchCount
from mesh_attention.runtime.session.session import Session


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def made_in_another_thread() -> Session:
    session = object.__new__(Session)
    session.num_users = session._num_objects = 0

    def count() -> None:
        session.batches = BatchCount()

    in_another_thread(count)
    return session


def test_batches_are_numbered_where_the_first_user_joined_and_no_later_one() -> None:
    session = made_in_another_thread()
    assert session.batches.begin() is None
    session.join()
    assert session.batches.begin() == 1
    in_another_thread(session.join)  # a loader
    in_another_thread(session.batches.begin)
    assert session.batches.begin() == 2
