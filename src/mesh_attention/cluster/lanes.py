"""The two lanes of one simulated rank: what is next on each, and what has been done."""

from __future__ import annotations

from mesh_attention.cluster.clock import Activity
from mesh_attention.cluster.timeline import RankTimes
from mesh_attention.cluster.transfer import Transfer
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.program import Operation

__all__ = ["Lanes"]


class Lanes:
    """`calls` are the seconds of the kernel calls still to come of the computation under way, the
    next one last. `known_computing` is what the transfers of this rank were last told about it."""

    def __init__(
        self, rank: int, waits: tuple[tuple[int, ...], ...], operations: tuple[Operation, ...]
    ) -> None:
        self.rank = rank
        self.operations = operations
        self.times = RankTimes.of(len(operations))
        self.computation: Activity | None = None  # a kernel call
        self.calls: list[float] = []
        self.computing_at = 0
        self.communicating = False
        self.known_computing = False
        self.transfers: list[Transfer] = []
        self._waits = waits
        self._done = bytearray(len(operations))
        self._compute: list[int] = []
        self._communication: list[int] = []
        for at, op in enumerate(operations):
            (self._communication if is_communication(op) else self._compute).append(at)
        self._next_compute = self._next_communication = 0

    @property
    def finished(self) -> bool:
        return all(self._done)

    def take_computation(self) -> int | None:
        """The next computation, if it can begin now and nothing is under way."""
        if self._next_compute == len(self._compute):
            return None
        at = self._compute[self._next_compute]
        if not self._may_begin(at):
            return None
        self._next_compute += 1
        return at

    def take_communication(self) -> int | None:
        if self.communicating or self._next_communication == len(self._communication):
            return None
        at = self._communication[self._next_communication]
        if not self._may_begin(at):
            return None
        self._next_communication += 1
        return at

    def finish(self, at: int, now: float) -> None:
        self._done[at] = 1
        self.times.end[at] = now

    def _may_begin(self, at: int) -> bool:
        done = self._done
        return all(done[before] for before in self._waits[at])
