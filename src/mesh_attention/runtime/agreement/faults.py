"""When a call cannot go on: which rank is the cause, the same answer on every rank.

What a rank sees of a fault is a closed connection or a silence, most often of a rank that is as
innocent as itself. So each leaves word in the job's key-value store: the first cause told stands
for all. A rank that broke off tells why; one that ended on the same host is found by its process;
one that does not answer for some seconds is named as that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh_attention.runtime.agreement.identity import Identity
from mesh_attention.runtime.agreement.verdict import read_said
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
    """`explain` and `tell` never raise: they are called when something is wrong already."""

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
        """The cause as all ranks know it: ours, unless another was told before."""
        with suppress(LostStoreError):
            return as_words(self.store.compare_set(_CAUSE, "", cause))
        return as_words(cause.encode())

    def cause(self) -> str | None:
        """The cause, where a rank has told one."""
        for cause in self.store.there([_CAUSE]).values():
            return as_words(cause)
        return None

    def find_ended(self) -> str | None:
        """What was told, or that a rank of this host has ended."""
        with suppress(LostStoreError):
            if (cause := self.cause()) is not None:
                return cause
            ended = [rank for rank in self._ranks if rank != self._me and self._has_ended(rank)]
            return self.tell(f"{_named(ended)} {_verb(ended)} ended") if ended else None
        return None

    def find_cause(self, times: int) -> str | None:
        """The same, or that a rank has left. `times`: see `leave`."""
        ended = self.find_ended()
        if ended is not None:
            return ended
        left = self._left(times)
        if not left:
            return None
        return self.tell(f"{_named(left)} closed the last user of this process group")

    def leave(self, times: int) -> None:
        """This rank has given up all it had on the process group, for the n-th time."""
        with suppress(LostStoreError):
            self.store.set(f"left/{self._me}", str(times))

    def _left(self, times: int) -> list[int]:
        """Ranks that gave up once more than this one has."""
        keys = {rank: f"left/{rank}" for rank in self._ranks}
        ever = self.store.there(keys.values())
        return [rank for rank, key in keys.items() if as_number(ever.get(key, b"")) > times]

    def explain(self, seen: str, times: int) -> str:
        """The cause of what this rank has `seen`, in words. `times`: see `leave`."""
        try:
            return self._explained(seen, times)
        except LostStoreError as lost:
            return f"{lost}; seen here: {seen}"

    def _explained(self, seen: str, times: int) -> str:
        self.store.allow(0.0)
        self.store.set(f"answer/{self._me}", "")
        begun = time.monotonic()
        while True:
            cause = self.find_cause(times)
            if cause is not None:
                return f"{cause}; seen here: {seen}"
            silent = self._silent("answer/{}")
            if not silent:
                return seen
            if time.monotonic() - begun > ANSWER_SECONDS:
                cause = self.tell(f"{_named(silent)} {_verb(silent)} ended, or does not answer")
                return f"{cause}; seen here: {seen}"
            time.sleep(_PAUSE_SECONDS)

    def _silent(self, key: str) -> list[int]:
        heard = self.store.there([key.format(rank) for rank in self._ranks])
        return [rank for rank in self._ranks if key.format(rank) not in heard]

    def statements(self, place: int, identity: Identity) -> dict[int, dict[str, Any]]:
        """What ranks say of their calls, where these are known to differ; not of those that are
        silent. `place`: of the call, the same on all ranks.
        """
        key = f"call{place}/{{}}"
        if self._compared:
            self.store.forget([f"call{self._compared}/{self._me}"])
        self._compared = place
        said = {"statement": identity.statement, "error": None, "in_flight": False}
        self.store.set(key.format(self._me), json.dumps(said))
        begun = time.monotonic()
        while self._silent(key) and time.monotonic() - begun < ANSWER_SECONDS:
            time.sleep(_PAUSE_SECONDS)
        keys = {rank: key.format(rank) for rank in self._ranks}
        heard = self.store.there(keys.values())
        return {rank: read_said(heard[key]) for rank, key in keys.items() if key in heard}

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
