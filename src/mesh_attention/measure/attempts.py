"""Settings that may be refused: what is a refusal, and that all ranks agree on it.

A setting cannot run where the planner or the kernels refuse it, or where memory ends, on every rank
by itself. All else (a rank that ended, a lost store, a broken context, or anything that only some
ranks see) says nothing about the setting, and is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import torch
from torch.distributed.distributed_c10d import PrefixStore

from mesh_attention.errors import MeshAttentionError, PlanError
from mesh_attention.kernels.registry import KernelRefusedError
from mesh_attention.measure.ranks import Ranks
from mesh_attention.runtime.transport.groups import default_store
from mesh_attention.runtime.transport.job_store import asking_the_store

PATIENCE_SECONDS = 30.0  # for others to refuse the same
_MOST_CHARACTERS = 240
_PAUSE_SECONDS = 0.01

Found = TypeVar("Found")


@dataclass(frozen=True)
class Refusal:
    """Of a setting by itself, on all ranks."""

    reason: str


def reason_of(error: BaseException) -> str | None:
    """In one line, where it is about the setting; None where it may be about something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {_short(error)}"
    if isinstance(error, PlanError | KernelRefusedError):
        return _short(error)
    return None


class Attempts:
    """All ranks make the same ones. They agree by the store: a rank that is out of memory cannot
    know at which collective the others are."""

    def __init__(self, ranks: Ranks, *, patience: float = PATIENCE_SECONDS) -> None:
        name: str = ranks.of_first(lambda: uuid4().hex)
        self._store = PrefixStore(f"mesh_attention/attempts/{name}", default_store())
        self._ranks = ranks
        self._patience = patience
        self._made = 0

    def make(self, work: Callable[[], Found]) -> Found | Refusal:
        self._made += 1
        try:
            return work()
        except Exception as error:
            found = reason_of(error)
            if found is None:
                raise
            kind = type(error).__name__
        # Not while the error is held, and with it the memory of what has failed.
        return Refusal(self._agreed(kind, found))

    def _agreed(self, kind: str, reason: str) -> str:
        """What the first rank says, where all ranks have refused for a reason of one kind."""
        keys = [f"{self._made}/{rank}" for rank in range(self._ranks.size)]
        with asking_the_store():
            self._store.set(keys[self._ranks.rank], f"{kind}\n{reason}")
            end = time.monotonic() + self._patience
            while not (complete := self._store.check(keys)) and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)
            said = [self._store.get(key).decode() for key in keys] if complete else []
        if len({one.split("\n")[0] for one in said}) != 1:
            raise MeshAttentionError(
                f"rank {self._ranks.rank} could not run a setting, and not all ranks say the same: "
                f"{reason}"
            )
        return said[0].partition("\n")[2]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
