"""Greedy scheduling that never holds more than a given number of bytes.

An action is allowed only if, after it, draining eagerly stays within the cap and from the
lattice point then reached some path to the end stays within it too. So there is always a way
on, and the schedule is as eager as memory lets it be: with room to spare it is `greedy`'s own.
"""

from __future__ import annotations

from collections.abc import Set

from mesh_attention.errors import PlanError
from mesh_attention.plan.schedule.greedy import greedy_with_permission
from mesh_attention.plan.schedule.lattice import build_lattice
from mesh_attention.plan.schedule.memory import MemoryModel, Residency, drain
from mesh_attention.plan.schedule.tasks import Schedule, TaskGraph


class MemoryCapError(PlanError):
    """No schedule fits under the cap; `smallest_cap_bytes` is the smallest that does."""

    def __init__(self, cap_bytes: int, smallest_cap_bytes: int) -> None:
        super().__init__(
            f"no schedule fits into {_bytes_text(cap_bytes)}; "
            f"the smallest cap that fits is {_bytes_text(smallest_cap_bytes)}"
        )
        self.cap_bytes = cap_bytes
        self.smallest_cap_bytes = smallest_cap_bytes


def greedy_capped(
    graph: TaskGraph, model: MemoryModel, cap_bytes: int, *, gamma: float = 1.05
) -> Schedule:
    """`greedy` whose `order()` holds at most `cap_bytes`, as `peak_bytes` counts them."""
    residency = Residency.of(model)
    lattice = build_lattice(graph, residency)
    if cap_bytes < lattice.smallest_cap_bytes:
        raise MemoryCapError(cap_bytes, lattice.smallest_cap_bytes)

    def permits(done: Set[str], name: str) -> bool:
        after = done | {name}
        return (
            residency.peak_while(done, name) <= cap_bytes
            and lattice.bytes_to_go[lattice.point(after)] <= cap_bytes
            and drain(graph, residency, after).peak_bytes <= cap_bytes
        )

    return greedy_with_permission(graph, permits, gamma=gamma)


def _bytes_text(count: int) -> str:
    """
    >>> _bytes_text(1536)
    '1536 bytes (1.50 KiB)'
    """
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{count} bytes ({size:.2f} {unit})"
        size /= 1024
    return f"{count} bytes ({size:.2f} TiB)"
