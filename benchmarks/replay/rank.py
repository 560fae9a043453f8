"""One rank of a simulated plan, ready for a replay, and what the replay measured.

Nothing of the other ranks, no torch and no GPU: it is small and can be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mesh_attention.cost.timeline import Timeline
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Communication, Program
from mesh_attention.plan.language.text import parse_plan, plan_text
from mesh_attention.plan.language.workspace import workspace_map

SLOWEST = "slowest"
_NUMBERS = ("rank", "flops", "peak_tflops", "predicted")
_NEARLY_LAST = 0.03
_MOST_RANKS = 4


@dataclass(frozen=True, slots=True)
class RankToReplay:
    """`pass_` holds the program of this rank alone. `seconds` goes by operation: the simulated
    duration of communications, 0 for everything else. `flops` is 1/n of the whole by mask area."""

    plan: Plan
    pass_: Pass
    rank: int
    seconds: tuple[float, ...]
    flops: float
    peak_tflops: float
    predicted: dict[str, Any]

    @property
    def program(self) -> Program:
        return self.pass_.programs[0]

    def to_json(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {"plan": plan_text(self.plan), "seconds": self.seconds} | numbers

    @staticmethod
    def from_json(stored: dict[str, Any]) -> RankToReplay:
        plan = parse_plan(stored["plan"])
        numbers = {name: stored[name] for name in _NUMBERS}
        return RankToReplay(plan, plan.passes[0], seconds=tuple(stored["seconds"]), **numbers)


def rank_of(timeline: Timeline, asked: int | str) -> int:
    """A rank by its number, or the slowest (`may_be_slowest`)."""
    num_ranks = timeline.plan.num_ranks
    if asked == SLOWEST:
        return may_be_slowest(timeline)[0]
    if not isinstance(asked, int) or not 0 <= asked < num_ranks:
        raise MeshAttentionError(
            f"rank={asked}: the plan has ranks 0 to {num_ranks - 1}; or give {SLOWEST}"
        )
    return asked


def may_be_slowest(timeline: Timeline) -> list[int]:
    """Ranks that end nearly last in the simulation, the most work first. A replay says which of
    them is the slowest on a GPU. Ranks that wait for others end as late as those do, with less to
    compute. Of ranks whose computations last equally long only the first is listed."""
    ends = {rank: _end(timeline, rank) for rank in range(timeline.plan.num_ranks)}
    near = max(ends.values()) * (1 - _NEARLY_LAST)
    last = [rank for rank, end in ends.items() if end >= near]
    computing = {rank: _computing(timeline, rank) for rank in last}
    unlike: dict[tuple[float, ...], int] = {}
    for rank in sorted(last, key=lambda rank: (-sum(computing[rank]), -ends[rank], rank)):
        unlike.setdefault(computing[rank], rank)
    return list(unlike.values())[:_MOST_RANKS]


def _computing(timeline: Timeline, rank: int) -> tuple[float, ...]:
    """Microseconds of each computation."""
    times, operations = timeline.ranks[rank], timeline.pass_.programs[rank].operations
    return tuple(
        round((end - start) * 1e6)
        for op, start, end in zip(operations, times.start, times.end, strict=True)
        if not isinstance(op, Communication)
    )


def rank_to_replay(timeline: Timeline, asked: int | str = SLOWEST) -> RankToReplay:
    rank = rank_of(timeline, asked)
    times, program = timeline.ranks[rank], timeline.pass_.programs[rank]
    seconds = tuple(
        end - start if isinstance(op, Communication) else 0.0
        for op, start, end in zip(program.operations, times.start, times.end, strict=True)
    )
    groups = {name: members for name, members in timeline.pass_.groups.items() if rank in members}
    alone = replace(timeline.pass_, programs=(program,), groups=groups)
    return RankToReplay(
        plan=replace(timeline.plan, passes=(alone,), target=timeline.target),
        pass_=alone,
        rank=rank,
        seconds=seconds,
        flops=timeline.flops / timeline.plan.num_ranks,
        peak_tflops=timeline.cluster.gpu.peak_tflops,
        predicted=timeline.to_json() | {"rank_seconds": _end(timeline, rank)},
    )


def _end(timeline: Timeline, rank: int) -> float:
    return max(timeline.ranks[rank].end, default=0.0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """`seconds` is the median of `all_seconds`; `compute_seconds` that of the program alone.

    `peak_bytes` is all that was allocated at once on the GPU: shards, results, workspace, what
    kernel calls return, and `stand_in_bytes` of random numbers for the stand-ins to write (a few
    MiB; with copy engines as much as the largest message).
    """

    machine: str
    part: RankToReplay
    sms: int
    high_priority: bool
    seconds: float
    all_seconds: tuple[float, ...]
    compute_seconds: float
    peak_bytes: int
    workspace_bytes: int
    planned_scratch_bytes: int
    mask_bytes: int
    stand_in_bytes: int
    kernels: tuple[str, ...]

    @property
    def mfu_percent(self) -> float:
        return self._mfu(self.seconds)

    @property
    def compute_mfu_percent(self) -> float:
        """The bound: what is left if every communication is hidden and disturbs nothing."""
        return self._mfu(self.compute_seconds)

    def _mfu(self, seconds: float) -> float:
        """By the mean work of a rank; above the peak, this rank must have less than that."""
        mfu = 100.0 * self.part.flops / (self.part.peak_tflops * 1e12 * seconds)
        if mfu > 100.0:
            raise MeshAttentionError(
                f"rank {self.part.rank} would run at {mfu:.0f} % of the peak: it has less work "
                "than others, and is not the slowest; replay one of those"
            )
        return mfu

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.compute_seconds

    @property
    def planned_bytes(self) -> int:
        """Workspace, shards and results by the plan, what kernel calls return at most, masks."""
        workspace = workspace_map(self.part.program, self.part.plan.problem).total_bytes
        return workspace + self._other_bytes

    @property
    def needed_bytes(self) -> int:
        """The same with the workspace of the executor, which leaves out copies where it can."""
        return self.workspace_bytes + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        problem, buffers = self.part.plan.problem, self.part.program.buffers
        kept = sum(b.num_bytes(problem) for b in buffers if b.role is not Role.WORKSPACE)
        return kept + self.planned_scratch_bytes + self.mask_bytes

    def to_json(self) -> dict[str, Any]:
        part, predicted = self.part, self.part.predicted
        return {
            "compute": "measured",
            "network": "modelled",
            "machine": self.machine,
            "method": part.plan.method,
            "direction": part.pass_.direction.value,
            "ranks": part.plan.num_ranks,
            "rank": part.rank,
            "cluster": predicted["cluster"],
            "setting": predicted["setting"],
            "sms": self.sms,
            "high_priority": self.high_priority,
            "seconds": self.seconds,
            "all_seconds": list(self.all_seconds),
            "mfu_percent": self.mfu_percent,
            "peak_tflops": part.peak_tflops,
            "compute_seconds": self.compute_seconds,
            "compute_mfu_percent": self.compute_mfu_percent,
            "exposed_seconds": self.exposed_seconds,
            "communication_seconds": sum(part.seconds),
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.planned_bytes,
            "needed_bytes": self.needed_bytes,
            "mask_bytes": self.mask_bytes,
            "stand_in_bytes": self.stand_in_bytes,
            "kernels": list(self.kernels),
            "predicted_kernels": list(predicted.get("kernels", ())),
            "predicted_seconds": predicted["runtime_seconds"],
            "predicted_rank_seconds": predicted["rank_seconds"],
            "predicted_mfu_percent": predicted["mfu_percent"],
            "predicted_exposed_seconds": predicted["exposed_communication_seconds"],
            "predicted_peak_bytes": predicted["peak_bytes"],
        }
