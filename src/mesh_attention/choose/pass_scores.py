"""The settings of one pass, scored: an estimate of each, and the best few simulated with all ranks.

An estimate is what the busiest rank sees (`cost/estimate.py`). Where chunks are of unlike work,
ranks wait for each other in turn, and those in the corners of the grid show how long: they meet in
the groups in which all ranks meet, and one has the most work of a chunk where another has the
least. Both are bounds: no simulation of all ranks is shorter.

`search.py` says which settings are tried, `passes_together.py` which both passes want.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mesh_attention.choose.busiest import busiest_ranks, corner_ranks, degree_and_tile, shows_little
from mesh_attention.choose.scored import Score, Scored, SearchQuestion, gpu_bytes
from mesh_attention.choose.shapes import setting_key, shape_key
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

_MOST_WAITING = 8  # compiled plans take memory


def sum_of(scored: Sequence[Scored]) -> Score:
    return any(not setting.fits for setting in scored), sum(s.seconds for s in scored)


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
        self._waiting: dict[str, Compiled] = {}  # the last few of which too little is known
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
            compiled = compiled_on(plan, self._direction, self._asked.cluster, self._asked.kernel)
            scored = self._known[key] = self._estimated(compiled, method, setting)
            if _knows_too_little(scored):
                self._waiting[key] = compiled
                if len(self._waiting) > _MOST_WAITING:
                    del self._waiting[next(iter(self._waiting))]
                if self.best is not None and scored.score < self.best:
                    scored = self.met(scored)
            elif not scored.may_wait:
                self.best = min(self.best or scored.score, scored.score)
        except PlanError as error:
            # Without its frames: they hold all that the search has made, in a cycle.
            self.refusals.setdefault(method, error.with_traceback(None))
            self._known[key] = None
        self._asked.report()
        return scored

    def latest(self, scored: Scored) -> Scored:
        """The setting with what is known of it by now."""
        return self._known.get(setting_key(scored.name, scored.options)) or scored

    def best_in_common(
        self, other: PassScores, methods: Collection[str], *, stays: bool
    ) -> tuple[Scored, Scored] | None:
        """The setting of these methods in which both passes are fastest together, as far as both
        took it; of ties, that with the fewest operations. `stays`: of settings that leave tokens
        where they are."""
        both = ((self._known.get(key), scored) for key, scored in other._known.items())
        pairs = [(x, y) for x, y in both if x is not None and y is not None]
        pairs = [(x, y) for x, y in pairs if x.name in methods and x.stays >= stays]
        best: tuple[Scored, Scored] | None = None
        for pair in sorted(pairs, key=sum_of):
            if best is not None and sum_of(best) <= sum_of(pair):
                break  # with the waits of ranks it is no faster
            pair = self.met(pair[0]), other.met(pair[1])
            best = min(best or pair, pair, key=sum_of)
        if best is None:
            return None
        does_not_fit, seconds = sum_of(best)
        enough = does_not_fit, seconds * (1 + self._asked.effort.tie)
        fewer = [pair for pair in pairs if _num_operations(pair) < _num_operations(best)]
        fewer = [pair for pair in fewer if not METHODS[pair[0].name].by_stretches]
        for pair in sorted(fewer, key=lambda pair: (_num_operations(pair), sum_of(pair))):
            if sum_of(pair) <= enough:
                pair = self.met(self.latest(pair[0])), other.met(other.latest(pair[1]))
                if sum_of(pair) <= enough and not any(x.may_wait for x in pair):
                    return pair
        return best

    def is_under(self, enough: Score) -> bool:
        """Whether the best takes no longer than this. The corners of settings are looked at only
        where that decides."""
        while self.best is None or self.best > enough:
            waiting = [x for x in self._known.values() if x is not None and _knows_too_little(x)]
            least = min(waiting, key=lambda scored: scored.score, default=None)
            if least is None or least.score > enough:
                return False
            self.met(least)
        return True

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

    def _estimated(self, compiled: Compiled, method: str, setting: dict[str, Any]) -> Scored:
        asked, plan = self._asked, compiled.plan
        waits = self._may_wait(METHODS[method], setting)
        per_node = asked.cluster.node.ranks
        ranks = busiest_ranks(plan, method, setting, per_node, usual=0 if waits else None)
        how: Any = {"overlap": asked.overlap}
        seen = estimate(compiled, asked.cluster, self._direction, ranks=sorted(ranks), **how)
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
            seen.seconds,
            peak_bytes,
            fits=peak_bytes <= gpu_bytes(asked.cluster),
            place=str(plan.q_layout.to_json()),
            stays=tokens_stay(plan, asked.options),
            operations=seen.num_operations // copies,
            may_wait=waits,
            is_rough=self._is_rough(METHODS[method]),
            recalls=self.is_backward and bool(between),
            others_bytes=others_bytes,
            rank_operations=seen.num_operations // asked.num_ranks,
            busy_seconds=seen.busy_seconds,
        )

    def met(self, scored: Scored) -> Scored:
        """The setting, with the waits of ranks for each other in its seconds, where they can be
        known without a simulation: by the ranks in the corners of the grid."""
        if not _knows_too_little(scored):
            return scored
        asked, key = self._asked, setting_key(scored.name, scored.options)
        compiled = self._waiting.pop(key, None)
        if compiled is None:
            plan = asked.plan(self._direction, scored.name, scored.options)
            compiled = compiled_on(plan, self._direction, asked.cluster, asked.kernel)
        corners = corner_ranks(compiled.plan, scored.name, scored.options)
        seconds = seconds_of_few(compiled, asked.cluster, corners, asked.overlap)
        scored = replace(scored, seconds=max(scored.seconds, seconds), may_wait=False)
        self._known[key] = scored
        self.best = min(self.best or scored.score, scored.score)
        return scored

    def _is_rough(self, method: Method) -> bool:
        """Whether a simulation may take longer for another reason than unlike work: single rows
        travel, or keys from rank to rank, or the last node has fewer ranks than others."""
        ranks, per_node = self._asked.num_ranks, self._asked.cluster.node.ranks
        unlike_nodes = ranks > per_node and ranks % per_node > 0
        return method.by_stretches or method.rotates or unlike_nodes

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
            scored = self.met(scored)
            more = operations + scored.operations
            fits = more <= effort.simulated_operations
            may_simulate = fits and count < effort.simulated
            says_little = scored.may_wait or effort.every_name or (scored.is_rough and fits)
            uncertain = says_little and not scored.is_simulated
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
        a rank: the model cannot tell them apart, and operations cost more than it knows of. Rough
        estimates say too little for that."""
        enough = not best.fits, best.seconds * (1 + self._asked.effort.tie)
        fewer = [x for x in candidates if x.rank_operations < best.rank_operations]
        for _, same in groupby(sorted(fewer, key=_operations), _operations):
            ties = [self.met(self.latest(x)) for x in same if x.score <= enough]
            ties = [
                x
                for x in ties
                if x.score <= enough and (x.is_simulated or not (x.may_wait or x.is_rough))
            ]
            if ties:
                return min(ties, key=lambda scored: scored.score)
        return best


def _operations(scored: Scored) -> int:
    return scored.rank_operations


def _num_operations(pair: tuple[Scored, Scored]) -> int:
    return sum(scored.rank_operations for scored in pair)


def _knows_too_little(scored: Scored) -> bool:
    """Whether ranks may wait for each other, and the corners of the grid would show how long."""
    return scored.may_wait and _meets(METHODS[scored.name])


def _meets(method: Method) -> bool:
    """Whether ranks meet in rows and columns of a grid alone, so that its corners are enough."""
    return method.is_plain_box and not method.rotates
