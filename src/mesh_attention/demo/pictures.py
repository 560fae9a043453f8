"""Pictures of a plan: the assignment matrix and the schedule, with matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.schedule import TaskGraph, event_times
from mesh_attention.plan.schedule.tasks import Schedule
from mesh_attention.plots import pyplot

__all__ = ["draw_assignments", "draw_schedule"]

_COLOURS = {"AG-KV": "#8ecae6", "AG-Q": "#a8dadc", "C": "#ffb703"}
_LANES = ("communication", "computation")


def draw_assignments(panels: Sequence[tuple[str, Assignment]], path: Path) -> None:
    """Side by side: which rank computes each (Q partition, KV partition) cell."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.8), squeeze=False)
    for axis, (title, matrix) in zip(axes[0], panels, strict=True):
        size = len(matrix)
        axis.imshow(matrix, cmap="tab10" if size <= 10 else "tab20", interpolation="nearest")
        for i in range(size):
            for j in range(size):
                axis.text(j, i, str(matrix[i, j]), ha="center", va="center", color="white")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("KV partition")
        axis.set_ylabel("Q partition")
        axis.set_xticks(range(size))
        axis.set_yticks(range(size))
    figure.suptitle("The rank that computes each cell")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def draw_schedule(graph: TaskGraph, schedule: Schedule, title: str, path: Path) -> None:
    """Both lanes over time, each task starting when its own inputs are there (modelled costs)."""
    plt = pyplot()
    times = event_times(graph, schedule)
    communication = {node.task for node in graph.communication}
    figure, axis = plt.subplots(figsize=(12, 2.8))
    scale = 1e3
    for task, (start, stop) in times.items():
        lane = 0 if task in communication else 1
        colour = _COLOURS.get(task.kind, "#e5989b")
        axis.barh(lane, (stop - start) * scale, left=start * scale, color=colour, edgecolor="white")
        middle = (start + stop) / 2 * scale
        axis.text(middle, lane, str(task), ha="center", va="center", fontsize=7, rotation=90)
    axis.set_yticks(range(len(_LANES)), _LANES)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds, modelled: 40 GB/s of collectives, 500 TFLOP/s of attention")
    axis.set_title(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
