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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.identity import Identity
from mesh_attention.runtime.transport.groups import Groups, default_store, forget
from mesh_attention.runtime.transport.shared_memory import this_host

ANSWER_SECONDS = 3.0  # after a fault, for others to say that they are there
_PAUSE_SECONDS = 0.01
_CAUSE = "cause"


class LostStoreError(MeshAttentionError):
    """The job's key-value store does not answer."""


@contextmanager
def asking_the_store() -> Iterator[None]:
    """Around every use of the store."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
        raise LostStoreError(
            "the key-value store of the job does not answer: the process that keeps it (rank 0 of "
            f"the job, or the launcher) has probably ended ({str(error).splitlines()[0]})"
        ) from error


class Faults:
    """`explain` and `tell` never raise: they are called when something is wrong already."""

    def __init__(self, groups: Groups) -> None:
        self._ranks = groups.ranks
        self._me = groups.global_rank_of_self
        self._store = PrefixStore(f"{groups.lasting_name}/faults", default_store())
        with asking_the_store():
            self._store.set(f"process/{self._me}", json.dumps(_this_process()))
        self._compared = 0

    def tell(self, cause: str) -> str:
        """The cause as all ranks know it: ours, unless another was told before."""
        with suppress(LostStoreError), asking_the_store():
            return self._store.compare_set(_CAUSE, "", cause).decode()
        return cause

    def told(self) -> str | None:
        with asking_the_store():
            return self._store.get(_CAUSE).decode() if self._store.check([_CAUSE]) else None

    def find_ended(self) -> str | None:
        """What was told, or that a rank of this host has ended."""
        with suppress(LostStoreError):
            told = self.told()
            if told is not None:
                return told
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
        with suppress(LostStoreError), asking_the_store():
            self._store.set(f"left/{self._me}", str(times))

    def _left(self, times: int) -> list[int]:
        """Ranks that gave up once more than this one has."""
        keys = {rank: f"left/{rank}" for rank in self._ranks}
        with asking_the_store():
            ever = [rank for rank, key in keys.items() if self._store.check([key])]
            return [rank for rank in ever if int(self._store.get(keys[rank])) > times]

    def explain(self, seen: str, times: int) -> str:
        """The cause of what this rank has `seen`, in words. `times`: see `leave`."""
        try:
            return self._explained(seen, times)
        except LostStoreError as lost:
            return f"{lost}; seen here: {seen}"

    def _explained(self, seen: str, times: int) -> str:
        with asking_the_store():
            self._store.set(f"answer/{self._me}", "")
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
        with asking_the_store():
            return [r for r in self._ranks if not self._store.check([key.format(r)])]

    def statements(self, place: int, identity: Identity) -> dict[int, dict[str, Any]]:
        """What ranks say of their calls, where these are known to differ; not of those that are
        silent. `place`: of the call, the same on all ranks.
        """
        key = f"call{place}/{{}}"
        with asking_the_store():
            if self._compared:
                forget(self._store, f"call{self._compared}/{self._me}")
            self._compared = place
            said = {"statement": identity.statement, "error": None, "in_flight": False}
            self._store.set(key.format(self._me), json.dumps(said))
            begun = time.monotonic()
            while self._silent(key) and time.monotonic() - begun < ANSWER_SECONDS:
                time.sleep(_PAUSE_SECONDS)
            silent = self._silent(key)
            heard = [rank for rank in self._ranks if rank not in silent]
            return {rank: json.loads(self._store.get(key.format(rank))) for rank in heard}

    def _has_ended(self, rank: int) -> bool:
        with asking_the_store():
            key = f"process/{rank}"
            if not self._store.check([key]):
                return False
            host, number, started = json.loads(self._store.get(key))
        mine = _this_process()
        return bool(host == mine[0] and _start_of(number) != started)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _verb(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _this_process() -> list[object]:
    return [this_host(), os.getpid(), _start_of(os.getpid())]


def _start_of(process: int) -> str:
    """When a process of this host began; empty if it has ended, or where nobody can tell."""
    try:
        # After the name, which may hold anything: state, and 19 fields on the start.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
