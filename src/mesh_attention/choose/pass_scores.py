"""The settings of one pass, scored: an estimate of each, and the best few simulated with all ranks.

An estimate is what the busiest rank sees (`cost/estimate.py`). Where chunks are of unlike work,
ranks wait for each other in turn, and those in the corners of the grid show how long: they meet in
the groups in which all ranks meet, and one has the most work of a chunk where another has the
least. Both are bounds: no simulation of all ranks is shorter.

`search.py` says which settings are tried, `passes_together.py` which both passes want.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesh_attention.choose.busiest import busiest_ranks, corner_ranks, degree_and_tile, shows_little
from mesh_attention.choose.scored import Score, Scored, SearchQuestion, gpu_bytes
from mesh_attention.choose.shapes import setting_key
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.operation_costs import Compiled, compiled_on
from mesh_attention.cost.planning import tokens_stay
from mesh_attention.cost.simulator import seconds_of_few
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.problem.layout import Layout, LayoutKind

_CUTS = ("chunks", "head_slices", "even_chunks", "short_start")


def best_first(scored: Iterable[Scored]) -> list[Scored]:
    """By score. Of equal scores, what leaves tokens where they are is first, then fewer options."""
    return sorted(scored, key=lambda x: (x.score, not x.stays, len(x.options)))


class PassScores:
    """One pass in one layout. `scored` has every setting that a method took, the best first;
    `refusals` the first refusal of each method; `best` is the score of the best whose estimate
    knows how ranks wait."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
    ) -> None:
        self._asked, self._direction = asked, direction
        self.is_backward = direction is Direction.BACKWARD
        self._known: dict[str, Scored | None] = {}
        self._last: dict[Layout, Plan] = {}  # the next of this layout lowers the same tasks
        self.best: Score | None = None
        self.refusals: dict[str, PlanError] = {}
        # Ranks wait for each other where chunks are of unlike work.
        self.ranks_wait = layout is LayoutKind.ZIGZAG and not asked.problem.mask.is_full
        self.sparse = shows_little(asked.problem)

    @property
    def scored(self) -> list[Scored]:
        return best_first(scored for scored in self._known.values() if scored is not None)

    def attempt(self, method: str, setting: dict[str, Any]) -> Scored | None:
        """The setting with its score; None where the method refuses it."""
        key = setting_key(method, setting)
        if key in self._known:
            return self._known[key]
        scored = None
        try:
            plan = self._asked.plan(self._direction, method, setting)
            self._last[plan.q_layout] = plan
            scored = self._estimated(plan, method, setting)
        except PlanError as error:
            self.refusals.setdefault(method, error)
        self._known[key] = scored
        if scored is not None and not scored.may_wait:
            self.best = min(self.best or scored.score, scored.score)
        self._asked.report()
        return scored

    def best_sums(self, scored: Scored | None) -> Scored | None:
        """The setting, or the same with gradients of keys added inside nodes first, if that is
        faster."""
        if scored is None or not self._reduces_far(scored):
            return scored
        inside = {**scored.options, "combine": Combine.NODES.value}
        other = self.attempt(scored.name, inside)
        return scored if other is None or scored.score <= other.score else other

    def _reduces_far(self, scored: Scored) -> bool:
        """Whether gradients of keys leave nodes, and may be added inside nodes first."""
        ranks, per_node = self._asked.num_ranks, self._asked.cluster.node.ranks
        name, options = scored.name, scored.options
        degree, (a, b) = degree_and_tile(name, options, self._asked.problem, ranks)
        if not self.is_backward or not ranks > per_node > degree * a:
            return False
        return "combine" in METHODS[name].options() and "combine" not in options and b > 1

    def _estimated(self, plan: Plan, method: str, setting: dict[str, Any]) -> Scored:
        asked = self._asked
        waits, sees_corners = self._may_wait(METHODS[method], setting), _meets(METHODS[method])
        per_node = asked.cluster.node.ranks
        ranks = busiest_ranks(plan, method, setting, per_node, usual=0 if waits else None)
        compiled = compiled_on(plan, self._direction, asked.cluster, asked.kernel)
        how: Any = {"overlap": asked.overlap}
        seen = estimate(compiled, asked.cluster, self._direction, ranks=sorted(ranks), **how)
        seconds = seen.seconds
        # A rank by itself is a bound: if that is slower than the best, nothing more is to be known.
        if waits and sees_corners and (self.best is None or (False, seconds) < self.best):
            seconds, waits = max(seconds, self._of_corners(compiled, method, setting)), False
        buffers = plan.program(min(ranks), self._direction).buffers
        between = [buffer for buffer in buffers if buffer.role in (Role.KEPT, Role.RECALLED)]
        others = (asked.options.get("layers") or 1) - 1
        others_bytes = others * sum(buffer.num_bytes(asked.problem) for buffer in between)
        peak_bytes = seen.peak_bytes + others_bytes
        # Rings across nodes are simulated with all ranks, other passes with one of their copies.
        across = METHODS[method].rotates and plan.num_nodes > 1
        copies = 1 if across else plan.direction(self._direction).copies
        return Scored(
            self._direction,
            method,
            setting,
            seconds,
            peak_bytes,
            fits=peak_bytes <= gpu_bytes(asked.cluster),
            place=str(plan.q_layout.to_json()),
            stays=tokens_stay(plan, asked.options),
            operations=seen.num_operations // copies,
            may_wait=waits,
            recalls=self.is_backward and bool(between),
            others_bytes=others_bytes,
            rank_operations=seen.num_operations // asked.num_ranks,
        )

    def _of_corners(self, compiled: Compiled, method: str, setting: Mapping[str, Any]) -> float:
        """Seconds of the ranks in the corners of the grid."""
        asked, corners = self._asked, corner_ranks(compiled.plan, method, setting)
        return seconds_of_few(compiled, asked.cluster, corners, asked.overlap)

    def _met(self, scored: Scored) -> Scored:
        """The setting, with the waits of ranks for each other in its seconds, where they can be
        known without a simulation."""
        if not scored.may_wait or not _meets(METHODS[scored.name]):
            return scored
        plan = self._asked.plan(self._direction, scored.name, scored.options)
        compiled = compiled_on(plan, self._direction, self._asked.cluster, self._asked.kernel)
        few = self._of_corners(compiled, scored.name, scored.options)
        scored = replace(scored, seconds=max(scored.seconds, few), may_wait=False)
        self._known[setting_key(scored.name, scored.options)] = scored
        return scored

    def _may_wait(self, method: Method, setting: Mapping[str, Any]) -> bool:
        """Whether ranks have unlike work before they meet. In one unit all have the same; under a
        mask that shows little they meet at every step of a ring."""
        if method.all_exchange:
            return False
        if self.sparse and not method.by_stretches and not method.is_plain_box:
            return True
        chunked = (setting.get("chunks") or (1, 1)) != (1, 1) and not setting.get("even_chunks")
        return (self.ranks_wait and chunked) or (self.sparse and method.rotates)

    def best_of(self, candidates: Sequence[Scored]) -> Scored:
        """The best of settings that come in the order of their estimates. They are simulated until
        no other estimate is shorter than the best simulation. Settings of one shape differ less
        than shapes do, so the best of each shape come first. An estimate does not win over a
        simulation: once the effort is spent, the next that seems faster is simulated as the last.
        """
        effort, operations, count = self._asked.effort, 0, 0
        best: Scored | None = None
        least: Score = (True, math.inf)
        firsts: dict[str, Scored] = {}
        for scored in candidates:
            firsts.setdefault(shape_key(scored.name, scored.options), scored)
        rest = [scored for scored in candidates if scored not in firsts.values()]
        for scored in (*firsts.values(), *rest):
            if least <= scored.score:
                continue
            scored = self._met(scored)
            more = operations + scored.operations
            may_simulate = count < effort.simulated and more <= effort.simulated_operations
            uncertain = not scored.is_simulated and (scored.may_wait or effort.every_name)
            if not may_simulate and scored.may_wait:
                continue  # its estimate says too little
            is_last = not may_simulate and best is not None and best.is_simulated
            if uncertain and (may_simulate or is_last):
                operations, count = more, count + 1
                scored = self._asked.simulated(scored)
                self._known[setting_key(scored.name, scored.options)] = scored
            if scored.score < least:
                best, least = scored, scored.score
            if uncertain and is_last:
                break
        return self._simplest_of_ties(best, candidates) if best else candidates[0]

    def _simplest_of_ties(self, best: Scored, candidates: Sequence[Scored]) -> Scored:
        """Among settings that are nearly as fast as the best, the one with the fewest operations of
        a rank: the model cannot tell them apart, and operations cost more than it knows of.
        Estimates of single rows that travel say too little for that."""
        enough = not best.fits, best.seconds * (1 + self._asked.effort.tie)
        ties = [best]
        for scored in candidates:
            if scored.score > enough or scored.rank_operations >= best.rank_operations:
                continue
            known = self._known.get(setting_key(scored.name, scored.options))
            scored = self._met(known or scored)
            is_bound = scored.may_wait or METHODS[scored.name].by_stretches
            if scored.score <= enough and (scored.is_simulated or not is_bound):
                ties.append(scored)
        return min(ties, key=lambda scored: (scored.rank_operations, scored.score))


def _meets(method: Method) -> bool:
    """Whether ranks meet in rows and columns of a grid alone, so that its corners are enough."""
    return method.is_plain_box and not method.rotates


def shape_key(method: str, options: Mapping[str, Any]) -> str:
    """A key of all that is not about cuts."""
    rest = ((k, str(v)) for k, v in options.items() if k.removeprefix("backward_") not in _CUTS)
    return f"{method} {sorted(rest)}"
