"""All methods side by side, each at its best setting, counted from real plans.

`mesh-attention volume --compare` shows it. No cluster is simulated: the best setting has the fewest
bytes into a node (within one node, the fewest bytes) in the forward pass, then the fewest bytes in
all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import SendRecv
from mesh_attention.plan.methods.question import ask
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import PassCount, count


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes of a rank, the largest over all ranks (or nodes)."""

    total_bytes: int
    inter_node_bytes: float
    peak_buffer_bytes: int
    collectives: int
    point_to_point: int

    @staticmethod
    def of(counted: PassCount) -> Counts:
        shifts = max(rank.times.get(SendRecv.__name__, 0) for rank in counted.ranks)
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
        passes = {direction.value: asdict(counts) for direction, counts in self.counts.items()}
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
    several = bool(ranks_per_node and ranks_per_node < num_ranks)

    def counts_of(method: str, direction: Direction, options: dict[str, Any]) -> Counts:
        plan = ask(problem, num_ranks, method=method, directions=(direction,), **options).plan()
        return Counts.of(count(plan)[direction])

    for name, settings in tries.items():
        usable = {key: x for key, x in shared.items() if key in METHODS[name].options()}
        best: tuple[tuple[float, float], dict[str, Any], Counts] | None = None
        reason = None
        for setting in settings:
            try:
                counts = counts_of(name, Direction.FORWARD, usable | setting)
            except PlanError as error:
                reason = reason or str(error)
            else:
                sizes = counts.inter_node_bytes, float(counts.total_bytes)
                score = sizes if several else sizes[::-1]
                if best is None or score < best[0]:
                    best = (score, setting, counts)
            done += 1
            if progress:
                progress(done, total)
        if best is None:
            rows.append(Compared(name, {}, {}, reason))
        else:
            _, setting, counts = best
            back = counts_of(name, Direction.BACKWARD, usable | setting)
            both = {Direction.FORWARD: counts, Direction.BACKWARD: back}
            rows.append(Compared(name, setting, both))
    return rows
