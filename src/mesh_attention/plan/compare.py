"""All methods side by side, each at its best setting, counted from real plans.

Without a cluster to simulate, best means: the fewest bytes into a node (or, within one node, the
fewest bytes), forward and backward together; then the fewest bytes in all. Time is another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.count import PassCount, count
from mesh_attention.plan.methods.table import METHODS, make_plan
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import SendRecv

__all__ = ["Compared", "Counts", "compare"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes a rank, the largest over all ranks (nodes)."""

    total_bytes: int
    inter_node_bytes: float
    peak_buffer_bytes: int
    collectives: int
    point_to_point: int

    @staticmethod
    def of(plan: Plan, direction: Direction, counted: PassCount) -> Counts:
        shifts = max(
            sum(isinstance(op, SendRecv) for op in program.operations)
            for program in plan.direction(direction).programs
        )
        numbers = counted.to_json()
        return Counts(
            numbers["bytes_per_rank"]["max"],
            numbers["inter_node_bytes_per_rank"]["max"],
            counted.peak_buffer_bytes,
            numbers["communications_per_rank"]["max"] - shifts,
            shifts,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A method at its best setting, or the reason why it cannot run here."""

    method: str
    setting: dict[str, Any]
    counts: dict[Direction, Counts]
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        passes = {
            direction.value: {name: getattr(one, name) for name in Counts.__slots__}
            for direction, one in self.counts.items()
        }
        return {"method": self.method, "setting": self.setting, "reason": self.reason} | passes


def compare(
    problem: Problem,
    num_ranks: int,
    ranks_per_node: int | None,
    options: dict[str, Any] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Compared]:
    """`options` go to every method that has them, such as the layout."""
    nodes = {"ranks_per_node": ranks_per_node} if ranks_per_node else {}
    shared = (options or {}) | nodes
    tries = {
        name: method.candidates(problem, num_ranks, ranks_per_node)
        for name, method in METHODS.items()
    }
    total, done = sum(map(len, tries.values())), 0
    rows = []
    for name, settings in tries.items():
        best: tuple[tuple[float, float], Compared] | None = None
        reason = None
        for setting in settings:
            usable = {key: x for key, x in shared.items() if key in METHODS[name].options()}
            try:
                plan = make_plan(problem, num_ranks, method=name, **(usable | setting))
            except PlanError as error:
                reason = str(error)
            else:
                found = Compared(name, setting, dict(_counts(plan)))
                score = _score(found, bool(ranks_per_node and ranks_per_node < num_ranks))
                if best is None or score < best[0]:
                    best = (score, found)
            done += 1
            if progress:
                progress(done, total)
        rows.append(best[1] if best else Compared(name, {}, {}, reason))
    return rows


def _counts(plan: Plan) -> Iterator[tuple[Direction, Counts]]:
    for direction, counted in count(plan).items():
        yield direction, Counts.of(plan, direction, counted)


def _score(found: Compared, several_nodes: bool) -> tuple[float, float]:
    crossing = sum(one.inter_node_bytes for one in found.counts.values())
    moved = float(sum(one.total_bytes for one in found.counts.values()))
    return (crossing, moved) if several_nodes else (moved, crossing)
