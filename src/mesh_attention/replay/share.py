"""What one rank has to do in a simulated plan, and how long each of its communications lasts.

Everything that a replay needs and nothing of the other ranks: it is small, can be stored, and is
made without torch and without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mesh_attention.cluster.timeline import Timeline
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.dependencies import is_communication
from mesh_attention.plan.plan import Pass, Plan
from mesh_attention.plan.program import Program

__all__ = ["SLOWEST", "Share", "rank_of", "share_of"]

SLOWEST = "slowest"


@dataclass(frozen=True, slots=True)
class Share:
    """`one` holds the program of this rank alone. `seconds` goes by operation: the simulated
    duration of communications, 0 for everything else. `flops` is 1/n of the whole by mask area."""

    plan: Plan
    one: Pass
    rank: int
    seconds: tuple[float, ...]
    flops: float
    peak_tflops: float
    predicted: dict[str, Any]

    @property
    def program(self) -> Program:
        return self.one.programs[0]


def rank_of(timeline: Timeline, asked: int | str) -> int:
    """A rank by its number, or the one that ends last (the first of several)."""
    num_ranks = timeline.plan.num_ranks
    if asked == SLOWEST:
        return max(range(num_ranks), key=lambda rank: (_end(timeline, rank), -rank))
    if not isinstance(asked, int) or not 0 <= asked < num_ranks:
        raise MeshAttentionError(
            f"rank={asked}: the plan has ranks 0 to {num_ranks - 1}; or give {SLOWEST}"
        )
    return asked


def share_of(timeline: Timeline, asked: int | str = SLOWEST) -> Share:
    rank = rank_of(timeline, asked)
    one, times = timeline.one, timeline.ranks[rank]
    program = one.programs[rank]
    seconds = tuple(
        end - start if is_communication(op) else 0.0
        for op, start, end in zip(program.operations, times.start, times.end, strict=True)
    )
    own = {name: members for name, members in one.groups.items() if rank in members}
    alone = replace(one, programs=(program,), groups=own)
    return Share(
        plan=replace(timeline.plan, passes=(alone,)),
        one=alone,
        rank=rank,
        seconds=seconds,
        flops=timeline.flops / timeline.plan.num_ranks,
        peak_tflops=timeline.cluster.gpu.peak_tflops,
        predicted=timeline.to_json() | {"rank_seconds": _end(timeline, rank)},
    )


def _end(timeline: Timeline, rank: int) -> float:
    return max(timeline.ranks[rank].end, default=0.0)
