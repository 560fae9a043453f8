"""What `mesh-attention simulate` says about the passes it simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_attention.cli.output import table
from mesh_attention.cluster.cluster import Cluster
from mesh_attention.cluster.planning import setting_of
from mesh_attention.cluster.timeline import Timeline
from mesh_attention.plan.draw import bytes_text
from mesh_attention.plan.draw.summary import problem_text
from mesh_attention.plan.plan import Direction

__all__ = ["Simulated", "for_people", "list_clusters"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A timeline, the options its plan was made with, and how many were tried to find them."""

    timeline: Timeline
    options: dict[str, Any]
    tried: int | None = None

    @property
    def direction(self) -> Direction:
        return self.timeline.one.direction

    @property
    def setting(self) -> dict[str, Any]:
        return setting_of(self.timeline.plan, self.timeline.one, self.options)

    def to_json(self) -> dict[str, Any]:
        tried = {} if self.tried is None else {"settings_tried": self.tried}
        return self.timeline.to_json() | {"setting": self.setting} | tried


def for_people(found: Sequence[Simulated]) -> str:
    first = found[0].timeline
    plan, cluster = first.plan, first.cluster
    nodes = -(-plan.num_ranks // cluster.node.ranks)
    head = (
        f"{plan.method} on {plan.num_ranks} ranks of {cluster.name}, {nodes} "
        f"node{'s' if nodes > 1 else ''} of {cluster.node.ranks}\n{problem_text(plan.problem)}"
    )
    numbers = [one.to_json() for one in found]
    rows = [
        ["", *(one.direction.value for one in found)],
        ["runtime", *(_seconds_text(n["runtime_seconds"]) for n in numbers)],
        ["MFU", *(f"{n['mfu_percent']:.1f} %" for n in numbers)],
        ["exposed communication", *map(_exposed_text, numbers)],
        [
            "communication busy, mean",
            *(_seconds_text(n["communication_busy_seconds"]["mean"]) for n in numbers),
        ],
        ["received by a rank, max", *(bytes_text(n["received_bytes"]["max"]) for n in numbers)],
        ["peak memory", *(bytes_text(n["peak_bytes"]) for n in numbers)],
    ]
    lines = [head, table(rows)]
    for one in found:
        tried = "" if one.tried is None else f" (best of {one.tried} tried)"
        words = ", ".join(f"{key} {_word(value)}" for key, value in one.setting.items())
        lines.append(f"{one.direction}: {words}{tried}")
        limit = cluster.gpu.memory_gib * 2**30
        if one.timeline.peak_bytes > limit:
            lines.append(f"{one.direction}: needs more than the {bytes_text(limit)} of a GPU")
    lines.append(f"Modelled, not measured; overlap {first.overlap}; memory for batch 1.")
    return "\n".join(lines)


def _word(value: object) -> str:
    return "none" if value is None else str(value)


def _seconds_text(seconds: float) -> str:
    """
    >>> _seconds_text(0.01234), _seconds_text(12.3456)
    ('12.340 ms', '12.346 s')
    """
    return f"{seconds:.3f} s" if seconds >= 10 else f"{seconds * 1e3:.3f} ms"


def _exposed_text(numbers: dict[str, Any]) -> str:
    exposed, runtime = numbers["exposed_communication_seconds"], numbers["runtime_seconds"]
    share = exposed / runtime if runtime else 0.0
    return f"{_seconds_text(exposed)} ({share:.0%})"


def list_clusters(clusters: Sequence[Cluster]) -> str:
    width = max(len(one.name) for one in clusters)
    return "\n".join(
        f"{one.name:<{width}}  {one.nodes} x {one.node.ranks} GPUs: {one.description}"
        for one in clusters
    )
