"""What the ranks of a host tell each other before they share memory, through the job's store."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from mesh_attention.errors import MeshAttentionError

__all__ = ["HostList", "Notices"]

Notice = Mapping[str, str]


class Notices:
    """Rounds in which every one of `ranks` says something and hears all others."""

    def __init__(
        self, store: Store, name: str, ranks: Sequence[int], me: int, timeout: timedelta
    ) -> None:
        self._name = name
        self._store = PrefixStore(name, store)
        self._ranks = tuple(ranks)
        self._me = me
        self._timeout = timeout
        self._rounds = 0

    def exchange(self, said: Notice) -> dict[int, Notice]:
        self._rounds += 1
        keys = {rank: f"{self._rounds}/{rank}" for rank in self._ranks}
        self._store.set(keys[self._me], json.dumps(dict(said)))
        try:
            self._store.wait(list(keys.values()), self._timeout)
        except RuntimeError as late:
            silent = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise MeshAttentionError(
                f"ranks {silent} on this host did not answer within "
                f"{self._timeout.total_seconds():.0f} s"
            ) from late
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}


class HostList:
    """The ranks on this host: each enters itself, and reads no other host's list."""

    def __init__(self, store: Store, name: str, me: int) -> None:
        host = hashlib.sha256(_this_host().encode()).hexdigest()[:16]
        self._store = PrefixStore(f"{name}/{host}", store)
        place = self._store.add("entries", 1)
        self._store.set(str(place), str(me))

    def ranks(self) -> tuple[int, ...]:
        """Complete once all ranks have met for another reason."""
        entries = self._store.add("entries", 0)
        return tuple(sorted(int(self._store.get(str(i + 1))) for i in range(entries)))


def _this_host() -> str:
    """Equal for processes that can hand each other memory: one kernel, one space of process ids."""
    marks = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        marks.append(boot.read_text().strip())
    space = Path("/proc/self/ns/pid")
    if space.exists():
        marks.append(os.readlink(space))
    return " ".join(marks)
