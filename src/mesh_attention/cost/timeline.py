"""The result of a simulation: when every operation of every rank was issued, began and ended.

Search, command line and report read it; `pictures.py` shows it. For computation issue
and begin are the same; a communication is issued when its rank comes to it, and begins when the
other members have come too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from mesh_attention.cost.operation_costs import Overlap
from mesh_attention.cost.planning import num_pairs
from mesh_attention.errors import MeshAttentionError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.machine.target import Target
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import Communication, Free


class Stream(StrEnum):
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(slots=True)
class RankTimes:
    """The times of each operation of a program, in seconds from the beginning."""

    issued: list[float]
    start: list[float]
    end: list[float]

    @staticmethod
    def of(num_operations: int) -> RankTimes:
        return RankTimes(*([0.0] * num_operations for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Event:
    rank: int
    stream: Stream
    name: str  # of the operation
    kind: str  # the class of the operation
    issued: float
    start: float
    end: float


def some_timelines(value: Any) -> Sequence[Timeline]:
    """Returns an argument of pictures and traces, which must be a list of at least one timeline."""
    if (
        not isinstance(value, Sequence)
        or not value
        or not all(isinstance(timeline, Timeline) for timeline in value)
    ):
        raise MeshAttentionError("give a list of at least one Timeline, as simulate(...) returns")
    return value


@dataclass(frozen=True)
class Timeline:
    plan: Plan
    pass_: Pass
    cluster: Cluster
    overlap: Overlap
    ranks: tuple[RankTimes, ...]
    workspace_bytes: int  # of the rank that needs most, for one batch element
    received_bytes: tuple[int, ...]  # by each rank, in the transfers that took place
    far_bytes: tuple[int, ...]  # those of them that came from other nodes
    kernel_seconds: dict[str, float]  # of attention on all ranks, by kernel, if nothing slowed it
    target: Target | None = None  # for which the programs of `pass_` were compiled

    @cached_property
    def runtime_seconds(self) -> float:
        return max((max(times.end, default=0.0) for times in self.ranks), default=0.0)

    def events(self, rank: int) -> Iterator[Event]:
        """Everything that takes time on one rank, in program order."""
        times = self.ranks[rank]
        for at, op in enumerate(self.pass_.programs[rank].operations):
            if isinstance(op, Free):
                continue
            stream = Stream.COMMUNICATION if isinstance(op, Communication) else Stream.COMPUTE
            yield Event(
                rank,
                stream,
                op.name,
                type(op).__name__,
                times.issued[at],
                times.start[at],
                times.end[at],
            )

    @cached_property
    def busy_seconds(self) -> tuple[dict[Stream, float], ...]:
        """For each rank the seconds that each stream works."""
        return tuple(busy for busy, _ in self._busy)

    @cached_property
    def _busy(self) -> list[tuple[dict[Stream, float], float]]:
        """For each rank: the seconds that each stream works, and the seconds in which at least one
        stream works. Ranks that were not simulated share the times of a rank that was."""
        by_times: dict[int, tuple[dict[Stream, float], float]] = {}
        for rank, times in enumerate(self.ranks):
            if id(times) not in by_times:
                by_times[id(times)] = self._busy_of(rank)
        return [by_times[id(times)] for times in self.ranks]

    def _busy_of(self, rank: int) -> tuple[dict[Stream, float], float]:
        busy, until = dict.fromkeys(Stream, 0.0), dict.fromkeys(Stream, 0.0)
        any_busy = any_until = 0.0
        for event in sorted(self.events(rank), key=lambda event: event.start):
            begin = max(event.start, until[event.stream])  # transfers may run at once
            busy[event.stream] += max(0.0, event.end - begin)
            until[event.stream] = max(begin, event.end)
            any_busy += max(0.0, event.end - max(event.start, any_until))
            any_until = max(any_until, event.end)
        return busy, any_busy

    @property
    def idle_seconds(self) -> list[float]:
        """The seconds in which each rank computes nothing: it waits for data, for other ranks, and
        at the end for the slowest rank."""
        return [self.runtime_seconds - busy[Stream.COMPUTE] for busy in self.busy_seconds]

    @property
    def exposed_communication_seconds(self) -> float:
        """The mean of `idle_seconds` over ranks."""
        return sum(self.idle_seconds) / len(self.ranks)

    @property
    def waiting_for_ranks_seconds(self) -> float:
        """The part of `exposed_communication_seconds` in which a rank has no transfer in flight
        either: it waits until other ranks come to a transfer, or until they finish the pass."""
        busy = sum(any_busy for _, any_busy in self._busy) / len(self.ranks)
        waiting = self.runtime_seconds - busy
        return min(max(waiting, 0.0), self.exposed_communication_seconds)

    @property
    def open_communication_seconds(self) -> float:
        """The rest of `exposed_communication_seconds`: the rank has a transfer in flight."""
        return self.exposed_communication_seconds - self.waiting_for_ranks_seconds

    @property
    def kernels(self) -> dict[str, float]:
        """The fraction of the time of attention that each kernel takes, the largest first."""
        total = sum(self.kernel_seconds.values())
        order = sorted(self.kernel_seconds.items(), key=lambda item: -item[1])
        return {name: seconds / total for name, seconds in order}

    @cached_property
    def flops(self) -> float:
        """The floating-point operations of all ranks, for the pairs that the mask allows."""
        problem = self.plan.problem
        backward = self.pass_.direction is Direction.BACKWARD
        return problem.flops(num_pairs(problem), backward=backward)

    @property
    def mfu_percent(self) -> float:
        peak = self.cluster.gpu.peak_tflops * 1e12 * self.plan.num_ranks
        return 100.0 * self.flops / (peak * self.runtime_seconds) if self.runtime_seconds else 0.0

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes of a rank: workspace, the caller's shards and the results."""
        problem, programs = self.plan.problem, self.pass_.programs
        kept = max(  # `copies` consecutive ranks differ in their heads only: the first is enough
            sum(b.num_bytes(problem) for b in programs[r].buffers if b.role is not Role.WORKSPACE)
            for r in range(0, len(programs), self.pass_.copies)
        )
        return self.workspace_bytes + kept

    def to_json(self) -> dict[str, Any]:
        busy = [by_stream[Stream.COMMUNICATION] for by_stream in self.busy_seconds]
        received = self.received_bytes
        return {
            "method": self.plan.method,
            "direction": self.pass_.direction.value,
            "ranks": self.plan.num_ranks,
            "cluster": self.cluster.name,
            "overlap": self.overlap.value,
            "setting": self.pass_.setting | {"layout": str(self.plan.q_layout.kind)},
            "kernels": self.kernels,
            "runtime_seconds": self.runtime_seconds,
            "mfu_percent": self.mfu_percent,
            "exposed_communication_seconds": self.exposed_communication_seconds,
            "open_communication_seconds": self.open_communication_seconds,
            "waiting_for_ranks_seconds": self.waiting_for_ranks_seconds,
            "longest_idle_seconds": max(self.idle_seconds),
            "communication_busy_seconds": {"mean": sum(busy) / len(busy), "max": max(busy)},
            "peak_bytes": self.peak_bytes,
            "workspace_bytes": self.workspace_bytes,
            "received_bytes": {"mean": sum(received) / len(received), "max": max(received)},
        }
