"""When a call cannot go on: which rank is the cause, the same answer on every rank.

What a rank sees of a fault is a closed connection or a silence, most often of a rank that is as
innocent as itself. So ranks write causes to the job's key-value store, and the first cause stands
for all. A rank that broke off a call writes why. A rank that ended on the same host is found by its
process; a rank that does not answer for some seconds is named as such.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mesh_attention.runtime.agreement.identity import Identity
from mesh_attention.runtime.agreement.verdict import Said, read_said
from mesh_attention.runtime.transport.groups import Groups, default_store
from mesh_attention.runtime.transport.job_store import (
    ANSWER_SECONDS,
    JobStore,
    LostStoreError,
    as_number,
    as_words,
)
from mesh_attention.runtime.transport.shared_memory import this_host

_PAUSE_SECONDS = 0.01
_CAUSE = "cause"


class Faults:
    """The guard of a session asks it. `explain` and `tell` never raise: they are called when
    something is wrong already."""

    def __init__(self, groups: Groups) -> None:
        self._ranks = groups.ranks
        self._me = groups.global_rank_of_self
        seconds = groups.timeout(None).total_seconds()
        self.store = JobStore(f"{groups.lasting_name}/faults", default_store(), seconds)
        process = [this_host(), os.getpid(), _start_of(os.getpid())]
        self.store.set(f"process/{self._me}", json.dumps(process))
        self.store.allow(0.0)
        self._compared = 0

    def tell(self, cause: str) -> str:
        """Write a cause for all ranks. Returns the cause that stands: this, or an earlier one."""
        with suppress(LostStoreError):
            return as_words(self.store.compare_set(_CAUSE, "", cause))
        return as_words(cause.encode())

    def cause(self) -> str | None:
        """The cause that stands, if a rank has written one."""
        for cause in self.store.there([_CAUSE]).values():
            return as_words(cause)
        return None

    def find_cause(self, times: int) -> str | None:
        """The cause that stands; if there is none, that a rank of this host has ended, or that a
        rank has left. `times`: how often this rank has left (`leave`)."""
        with suppress(LostStoreError):
            if (cause := self.cause()) is not None:
                return cause
            ended = [rank for rank in self._ranks if rank != self._me and self._has_ended(rank)]
            if ended:
                return self.tell(f"{_named(ended)} {_verb(ended)} ended")
        left = [rank for rank, n in self._heard("left/{}").items() if as_number(n) > times]
        if not left:
            return None
        return self.tell(f"{_named(left)} closed the last user of this process group")

    def leave(self, times: int) -> None:
        """This rank has given up all it had on the process group, for the n-th time."""
        with suppress(LostStoreError):
            self.store.set(f"left/{self._me}", str(times))

    def explain(self, seen: str, times: int) -> str:
        """The cause of what this rank has `seen`, in words. `times`: as in `find_cause`."""
        try:
            self.store.allow(0.0)
            self.store.set(f"answer/{self._me}", "")
            begun = time.monotonic()
            while True:
                cause = self.find_cause(times)
                if cause is not None:
                    return f"{cause}; seen here: {seen}"
                answered = self._heard("answer/{}")
                silent = [rank for rank in self._ranks if rank not in answered]
                if not silent:
                    return seen
                if time.monotonic() - begun > ANSWER_SECONDS:
                    cause = self.tell(f"{_named(silent)} {_verb(silent)} ended, or does not answer")
                    return f"{cause}; seen here: {seen}"
                time.sleep(_PAUSE_SECONDS)
        except LostStoreError as lost:
            return f"{lost}; seen here: {seen}"

    def statements(self, place: int, identity: Identity) -> Said:
        """What ranks say of their calls, once these are known to differ; ranks that are silent are
        left out. `place`: of the call among all calls, the same on all ranks."""
        key = f"call{place}/{{}}"
        if self._compared:
            self.store.forget([f"call{self._compared}/{self._me}"])
        self._compared = place
        said = {"statement": identity.statement, "error": None, "in_flight": False}
        self.store.set(key.format(self._me), json.dumps(said))
        begun = time.monotonic()
        while len(heard := self._heard(key)) < len(self._ranks):
            if time.monotonic() - begun >= ANSWER_SECONDS:
                break
            time.sleep(_PAUSE_SECONDS)
        return {rank: read_said(its) for rank, its in heard.items()}

    def _heard(self, key: str) -> dict[int, bytes]:
        """What each rank has written under its key, `key` with its number; not of silent ranks."""
        keys = {rank: key.format(rank) for rank in self._ranks}
        values = self.store.there(keys.values())
        return {rank: values[key] for rank, key in keys.items() if key in values}

    def _has_ended(self, rank: int) -> bool:
        process = self.store.there([f"process/{rank}"])
        if not process:
            return False
        with suppress(ValueError, TypeError):  # of who wrote nonsense nothing is known
            host, number, started = json.loads(*process.values())
            return bool(host == this_host() and _start_of(number) != started)
        return False


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _verb(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _start_of(process: int) -> str:
    """When a process of this host began; empty if it has ended, or where nobody can tell."""
    try:
        # After the name, which may hold anything: state, and 19 fields on the start.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
