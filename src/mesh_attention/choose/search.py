"""What a search is asked, and how it judges one setting: by a few ranks, or by a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_attention.cost.copies import ranks_to_simulate
from mesh_attention.cost.estimate import Estimate, estimate
from mesh_attention.cost.machine.cluster import Cluster
from mesh_attention.cost.machine.load import a_cluster
from mesh_attention.cost.planning import plan_on
from mesh_attention.cost.simulator import simulate
from mesh_attention.cost.timeline import Timeline
from mesh_attention.cost.waits import Overlap
from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import choice
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.plan import Direction, Plan, a_direction
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.question import ask

RANKS_TOGETHER = 16  # at most, that are simulated for every setting that is cut
WAITS_UNSEEN = 1.05  # times what one rank sees of other settings that are cut, under a mask
NEAR_THE_BEST = 1.03  # times the best so far
FEW_RANKS = 64  # at most, where all ranks of several settings can be simulated

Progress = Callable[[int, int], None]
Key = tuple[tuple[str, Any], ...]  # a setting
Score = tuple[bool, float]  # whether it needs more memory than there is, and seconds


def key_of(setting: Mapping[str, Any]) -> Key:
    return tuple(sorted(setting.items()))


@dataclass(frozen=True)
class Search:
    """What is asked: one pass of any method, on a cluster. `candidates`: what was looked at more
    closely (`best.py`)."""

    problem: Problem
    num_ranks: int
    cluster: Cluster
    direction: Direction
    given: Mapping[str, Any]
    overlap: Overlap = Overlap.EVENTS
    kernel: str | None = None
    candidates: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    timelines: dict[tuple[str, Key], Timeline] = field(
        default_factory=dict, compare=False, repr=False
    )

    def plan(self, method: str, setting: Mapping[str, Any]) -> Plan:
        only = (self.direction,)
        return plan_on(
            *(self.cluster, self.problem, self.num_ranks),
            **{"method": method, "directions": only, **setting},
        )

    def estimate(self, plan: Plan, ranks: Sequence[int] | None = None) -> Estimate:
        how: dict[str, Any] = {"overlap": self.overlap, "kernel": self.kernel}
        return estimate(plan, self.cluster, self.direction, ranks=ranks, **how)

    def expected_seconds(
        self,
        plan: Plan,
        method: str,
        setting: Mapping[str, Any],
        seen: Estimate,
        best: float = math.inf,
    ) -> float:
        """From what one rank or three see. A mask may give ranks chunks of unlike work, and so they
        wait for each other: that is simulated where a few stand for all, and reckoned with
        otherwise. Of few ranks in all several settings are simulated in the end; in rings ranks
        wait for neighbours, which each of them sees. What takes longer than the best so far without
        all that is not looked at further, unless it is near: better ones may lie behind it."""
        one, n = plan.direction(self.direction), self.num_ranks
        is_cut = setting.get("chunks", (1, 1)) != (1, 1) or setting.get("head_slices") is not None
        if n <= FEW_RANKS or one.copies == 1 or not is_cut or METHODS[method].rotates:
            return seen.seconds
        if setting.get("even_chunks"):  # ranks have as much work, and wait for nobody
            return seen.seconds
        few = n <= RANKS_TOGETHER * one.copies
        if few and seen.seconds > NEAR_THE_BEST * best:
            return seen.seconds
        if few and len(ranks_to_simulate(plan, one, self.cluster, self.overlap)) < n:
            return max(seen.seconds, self.simulate(method, setting, plan).runtime_seconds)
        return seen.seconds * (1.0 if self.problem.mask.is_full else WAITS_UNSEEN)

    def simulate(
        self, method: str, setting: Mapping[str, Any], plan: Plan | None = None
    ) -> Timeline:
        """Once. `plan`: of this setting, where it is made already."""
        key = method, key_of(setting)
        if key not in self.timelines:
            plan = self.plan(method, setting) if plan is None else plan
            how: dict[str, Any] = {"overlap": self.overlap, "kernel": self.kernel}
            self.timelines[key] = simulate(plan, self.cluster, self.direction, **how)
        return self.timelines[key]

    def score(self, seconds: float, peak_bytes: int) -> Score:
        return peak_bytes > self.cluster.gpu.memory_gib * 2**30, seconds

    def score_of(self, timeline: Timeline) -> Score:
        return self.score(timeline.runtime_seconds, timeline.peak_bytes)


def a_search(
    problem: Problem,
    num_ranks: int,
    cluster: Cluster | str | Path,
    direction: Direction | str,
    options: Mapping[str, Any] | None,
    *,
    overlap: Overlap | str = Overlap.EVENTS,
    kernel: str | None = None,
) -> Search:
    """From what people give, or a refusal."""
    cluster, how = a_cluster(cluster), choice(Overlap, "overlap", overlap)
    if options is not None and not isinstance(options, Mapping):
        raise PlanError(f"options={options!r}: must be a mapping of names to values")
    num_ranks = ask(problem, num_ranks).num_ranks
    given = dict(options or {})
    return Search(problem, num_ranks, cluster, a_direction(direction), given, how, kernel)
