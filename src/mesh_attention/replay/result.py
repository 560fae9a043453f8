"""What a replay found, with the limits beside it. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesh_attention.plan.buffers import Role
from mesh_attention.plan.workspace import workspace_map
from mesh_attention.replay.share import Share

__all__ = ["Replayed"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """`seconds` is the median of `all_seconds`; `compute_seconds` that of the program alone.

    `peak_bytes` is all that was allocated at once on the GPU: shards, results, workspace, what
    kernel calls return, and `stand_in_bytes` of random numbers for the stand-ins to write (a few
    MiB; with copy engines as much as the largest message).
    """

    machine: str
    share: Share
    sms: int
    high_priority: bool
    seconds: float
    all_seconds: tuple[float, ...]
    compute_seconds: float
    peak_bytes: int
    planned_scratch_bytes: int
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
        return 100.0 * self.share.flops / (self.share.peak_tflops * 1e12 * seconds)

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.compute_seconds

    @property
    def planned_bytes(self) -> int:
        """Workspace, shards and results by the program, and what kernel calls return at most."""
        problem, program = self.share.plan.problem, self.share.program
        kept = sum(b.num_bytes(problem) for b in program.buffers if b.role is not Role.WORKSPACE)
        workspace = workspace_map(program, problem).total_bytes
        return workspace + kept + self.planned_scratch_bytes

    def to_json(self) -> dict[str, Any]:
        share, predicted = self.share, self.share.predicted
        return {
            "compute": "measured",
            "network": "modelled",
            "machine": self.machine,
            "method": share.plan.method,
            "direction": share.one.direction.value,
            "ranks": share.plan.num_ranks,
            "rank": share.rank,
            "cluster": predicted["cluster"],
            "setting": predicted["setting"],
            "sms": self.sms,
            "high_priority": self.high_priority,
            "seconds": self.seconds,
            "all_seconds": list(self.all_seconds),
            "mfu_percent": self.mfu_percent,
            "peak_tflops": share.peak_tflops,
            "compute_seconds": self.compute_seconds,
            "compute_mfu_percent": self.compute_mfu_percent,
            "exposed_seconds": self.exposed_seconds,
            "communication_seconds": sum(share.seconds),
            "peak_bytes": self.peak_bytes,
            "planned_bytes": self.planned_bytes,
            "stand_in_bytes": self.stand_in_bytes,
            "kernels": list(self.kernels),
            "predicted_seconds": predicted["runtime_seconds"],
            "predicted_rank_seconds": predicted["rank_seconds"],
            "predicted_mfu_percent": predicted["mfu_percent"],
            "predicted_exposed_seconds": predicted["exposed_communication_seconds"],
            "predicted_peak_bytes": predicted["peak_bytes"],
        }
