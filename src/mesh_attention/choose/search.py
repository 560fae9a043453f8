"""One pass: shapes in the order of their promise, cuts of the best, the best few simulated.

1. Shapes (`shapes.py`), the most promising first, each in its first cut. A shape is left out when
   its bound exceeds the best so far.
2. The best of them in more cuts of their list (`cuts.py`), the best of these in coarser ones, in
   finer ones where coarser ones lose, with a short start and with even chunks.
3. The best settings simulated with all ranks, in the order of their estimates, until no other
   estimate is shorter than the best simulation.

An estimate is what the busiest rank sees (`cost/estimate.py`). Where chunks are of unlike work,
ranks wait for each other in turn, and those in the corners of the grid show how long: they meet in
the groups in which all ranks meet, and one has the most work of a chunk where another has the
least. Both are bounds: no simulation of all ranks is shorter.

`SearchEffort` says how many in each step. `auto.py` runs a search for each pass and layout. Nothing
here looks at a clock: ranks choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from mesh_attention.choose.busiest import busiest_ranks, corner_ranks, degree_and_tile, shows_little
from mesh_attention.choose.cuts import coarser_and_finer, cuts_of, variants_of
from mesh_attention.choose.scored import Score, Scored, SearchQuestion, gpu_bytes, place_of
from mesh_attention.choose.shapes import Shape, setting_key, shapes_of
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import Compiled, compiled_for, tokens_stay
from mesh_attention.cost.simulator import seconds_of_few
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.methods.parts.reduce import Combine
from mesh_attention.plan.methods.table import METHODS, Method
from mesh_attention.plan.problem.layout import Layout, LayoutKind

_CUTS = (
    "chunks",
    "head_slices",
    "even_chunks",
    "short_start",
    "backward_chunks",
    "backward_head_slices",
)


def best_first(scored: Iterable[Scored]) -> list[Scored]:
    """Of equal scores the one that leaves tokens where they are, with the fewest options."""
    return sorted(
        scored, key=lambda setting: (setting.score, not setting.stays, len(setting.options))
    )


class PassSearch:
    """One pass in one layout. `scored` has every setting that a method took, the best first;
    `refusals` the first refusal of each method."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
    ) -> None:
        self._asked, self._direction, self._layout = asked, direction, layout
        self._is_backward = direction is Direction.BACKWARD
        self._known: dict[str, Scored | None] = {}
        self._last: dict[Layout, Plan] = {}  # the next of this layout lowers the same tasks
        self._taken: dict[int, tuple[Score, Shape]] = {}  # the best cut of each of these shapes
        self._best: Score | None = None  # of those whose estimate knows how ranks wait
        self.refusals: dict[str, PlanError] = {}
        # Ranks wait for each other where chunks are of unlike work.
        self._ranks_wait = layout is LayoutKind.ZIGZAG and not asked.problem.mask.is_full
        # Programs of even chunks of thousands of ranks take seconds to make.
        few_ranks = asked.num_ranks <= asked.effort.ranks_of_even_chunks
        self._may_be_even = self._ranks_wait and few_ranks
        self._sparse = shows_little(asked.problem)

    @property
    def scored(self) -> list[Scored]:
        return best_first(setting for setting in self._known.values() if setting is not None)

    @cached_property
    def _shapes(self) -> list[Shape]:
        asked = self._asked
        return shapes_of(
            asked.problem,
            asked.num_ranks,
            asked.cluster,
            self._direction,
            asked.methods,
            asked.options,
            self._layout,
        )

    @cached_property
    def _enough(self) -> Score:
        """So near to the bound of all shapes as the tolerance."""
        bound = min((shape.least_seconds for shape in self._shapes), default=0.0)
        return False, bound * (1 + self._asked.effort.tolerance)

    def run(self) -> None:
        self.look()
        self.cut()

    def look(self) -> None:
        """At the most promising shapes, each in its first cut."""
        effort, boxes = self._asked.effort, set[str]()
        for number, shape in enumerate(self._shapes):
            if len(self._taken) >= effort.shapes:
                break
            if shape.box in boxes and not effort.every_name:
                continue
            boxes.add(shape.box)
            self._look_at(number)

    def look_as(self, other: PassSearch) -> None:
        """At the best shape of the other pass too: what is best for both may not promise most for
        either, and backward finds what forward keeps only where both have one setting."""
        if not other._taken:
            return
        best = other._shapes[other._best_first()[0]]
        for number, shape in enumerate(self._shapes):
            if (shape.name, shape.options) == (best.name, best.options):
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        shape = self._shapes[number]
        if number in self._taken or self._is_sure():
            return
        if self._best is not None and self._best < (False, shape.least_seconds):
            return
        shape, best_cut = self._first_cut(shape)
        if best_cut is not None:
            self._taken[number] = best_cut.score, shape

    def _best_first(self) -> list[int]:
        return sorted(self._taken, key=lambda number: (self._taken[number][0], number))

    def cut(self) -> None:
        """The best shapes in more cuts."""
        effort = self._asked.effort
        for num_shapes, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            for number in [x for x in self._best_first() if self._may_be_cut(x)][:num_shapes]:
                if self._is_sure():
                    break
                score, shape = self._taken[number]
                best_cut = self._try_cuts(shape, which)
                if best_cut is not None:
                    self._taken[number] = min(score, best_cut.score), shape
        for number in self._best_first()[: effort.refined]:
            self._refine(self._taken[number][1])
        self._try_variants([shape for _, shape in self._taken.values()])

    def _may_be_cut(self, number: int) -> bool:
        _, shape = self._taken[number]
        return len([*cuts_of(shape, self._direction, sparse=self._sparse)]) > 1

    def _is_sure(self) -> bool:
        return self._best is not None and self._best <= self._enough

    def _first_cut(self, shape: Shape) -> tuple[Shape, Scored | None]:
        """The shape too: with gradients of keys added inside nodes first, if that is faster."""
        first = self._try_cuts(shape, slice(0, 1))
        best_cut = self.best_sums(first)
        if best_cut is first or best_cut is None:
            return shape, best_cut
        options = {**shape.options, "combine": best_cut.options["combine"]}
        return replace(shape, options=options), best_cut

    def best_sums(self, setting: Scored | None) -> Scored | None:
        """The same with gradients of keys added inside nodes first, if that is faster."""
        if setting is None or not self._reduces_far(setting):
            return setting
        inside = {**setting.options, "combine": Combine.NODES.value}
        other = self.attempt(setting.name, inside)
        return setting if other is None or setting.score <= other.score else other

    def _try_cuts(self, shape: Shape, which: slice) -> Scored | None:
        """The best of these cuts of a shape, with even chunks where they are better."""
        tried = []
        for cut in [*cuts_of(shape, self._direction, sparse=self._sparse)][which]:
            setting = {**shape.options, **cut}
            if self._prefers_even(shape, setting):
                setting["even_chunks"] = True
            tried.append(self.attempt(shape.name, setting))
        taken = [scored for scored in tried if scored is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _refine(self, shape: Shape) -> None:
        """Climbs from the best cut of a shape to the best beside it, as long as that gains more
        than the tolerance: to whole heads, and to fewer and to more chunks. More hide less and
        less: where half as many are as good, but for the tolerance, twice as many gain nothing."""
        best, enough = self._best_of(shape), math.inf
        while best is not None and best.seconds < enough:
            enough = best.seconds / (1 + self._asked.effort.tolerance)
            self._try_beside(shape, best)
            best = self._best_of(shape)

    def _best_of(self, shape: Shape) -> Scored | None:
        key = _shape_key(shape.name, shape.options)
        return next((x for x in self.scored if key == _shape_key(x.name, x.options)), None)

    def _try_beside(self, shape: Shape, best: Scored) -> None:
        if "chunks" not in best.options or "chunks" in self._asked.options:
            return
        if "head_slices" in best.options and "head_slices" not in self._asked.options:
            whole = {name: x for name, x in best.options.items() if name != "head_slices"}
            self.attempt(shape.name, whole)
        enough = best.seconds * (1 + self._asked.effort.tolerance)
        for fewer, more in coarser_and_finer(best.options["chunks"]):
            coarser = fewer and self.attempt(shape.name, {**best.options, "chunks": fewer})
            if coarser is None or enough < coarser.seconds:
                self.attempt(shape.name, {**best.options, "chunks": more})

    def _reduces_far(self, setting: Scored) -> bool:
        """Whether gradients of keys leave nodes, and may be added inside nodes first."""
        ranks, per_node = self._asked.num_ranks, self._asked.cluster.node.ranks
        name, options = setting.name, setting.options
        degree, (a, b) = degree_and_tile(name, options, self._asked.problem, ranks)
        if not self._is_backward or not ranks > per_node > degree * a:
            return False
        return "combine" in METHODS[name].options() and "combine" not in options and b > 1

    def _prefers_even(self, shape: Shape, setting: Mapping[str, Any]) -> bool:
        """Backward, chunks of unlike work cost more in waiting than even ones do in calls."""
        if not self._is_backward or not self._may_be_even or shape.tile == (1, 1):
            return False
        return any("even_chunks" in variant for variant in variants_of(setting, shape, even=True))

    def _try_variants(self, shapes: Sequence[Shape]) -> None:
        """Of the best cuts of the best of these shapes."""
        effort = self._asked.effort
        shape_of = {_shape_key(shape.name, shape.options): shape for shape in shapes}
        cuts: dict[str, list[Scored]] = {}
        for scored in self.scored:
            key = _shape_key(scored.name, scored.options)
            if key in shape_of:
                cuts.setdefault(key, []).append(scored)
        for key in [*cuts][: effort.varied]:
            shape = shape_of[key]
            # Backward, attention of a slice outlasts its first transfers.
            starts_late = self._is_backward and shape.held > 1 and not effort.every_name
            for scored in [] if starts_late else cuts[key][: effort.varied_cuts]:
                for setting in variants_of(scored.options, shape, even=self._may_be_even):
                    self.attempt(scored.name, setting)

    def attempt(self, method: str, setting: dict[str, Any]) -> Scored | None:
        """How good it is; None where the method refuses it."""
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
            self._best = min(self._best or scored.score, scored.score)
        self._asked.report()
        return scored

    def _estimated(self, plan: Plan, method: str, setting: dict[str, Any]) -> Scored:
        asked = self._asked
        waits, sees_corners = self._may_wait(METHODS[method], setting), _meets(METHODS[method])
        per_node = asked.cluster.node.ranks
        ranks = busiest_ranks(plan, method, setting, per_node, usual=0 if waits else None)
        compiled = compiled_for(plan, self._direction, asked.cluster, asked.kernel)
        how: Any = {"overlap": asked.overlap}
        seen = estimate(compiled, asked.cluster, self._direction, ranks=sorted(ranks), **how)
        seconds = seen.seconds
        # A rank by itself is a bound: if that is slower than the best, nothing more is to be known.
        if waits and sees_corners and (self._best is None or (False, seconds) < self._best):
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
            place=place_of(plan),
            stays=tokens_stay(plan, asked.options),
            operations=seen.num_operations // copies,
            may_wait=waits,
            recalls=self._is_backward and bool(between),
            others_bytes=others_bytes,
            rank_operations=seen.num_operations // asked.num_ranks,
        )

    def _of_corners(self, compiled: Compiled, method: str, setting: Mapping[str, Any]) -> float:
        """Seconds of the ranks in the corners of the grid."""
        asked, corners = self._asked, corner_ranks(compiled.plan, method, setting)
        return seconds_of_few(
            compiled, asked.cluster, self._direction, corners, overlap=asked.overlap
        )

    def _met(self, setting: Scored) -> Scored:
        """With the waits of ranks for each other, if they can be known without a simulation."""
        if not setting.may_wait or not _meets(METHODS[setting.name]):
            return setting
        plan = self._asked.plan(self._direction, setting.name, setting.options)
        compiled = compiled_for(plan, self._direction, self._asked.cluster, self._asked.kernel)
        few = self._of_corners(compiled, setting.name, setting.options)
        setting = replace(setting, seconds=max(setting.seconds, few), may_wait=False)
        self._known[setting_key(setting.name, setting.options)] = setting
        return setting

    def _may_wait(self, method: Method, setting: Mapping[str, Any]) -> bool:
        """Whether ranks have unlike work before they meet. In one unit all have the same; under a
        mask that shows little they meet at every step of a ring."""
        if method.all_exchange:
            return False
        if self._sparse and not method.by_stretches and not method.is_plain_box:
            return True
        chunked = (setting.get("chunks") or (1, 1)) != (1, 1) and not setting.get("even_chunks")
        return (self._ranks_wait and chunked) or (self._sparse and method.rotates)

    def best_of(self, scored: Sequence[Scored]) -> Scored | None:
        """Of settings in the order of their estimates: simulated until no other estimate is shorter
        than the best simulation by more than the tolerance. Settings of one shape differ less than
        shapes do, so the best of each shape come first. An estimate does not win over a simulation:
        once the effort is spent, the next that seems faster is simulated too, as the last."""
        effort, operations, count = self._asked.effort, 0, 0
        best: Scored | None = None
        least: Score = (True, math.inf)
        firsts: dict[str, Scored] = {}
        for setting in scored:
            firsts.setdefault(_shape_key(setting.name, setting.options), setting)
        rest = [setting for setting in scored if setting not in firsts.values()]
        for setting in (*firsts.values(), *rest):
            if least <= setting.score:
                continue
            setting = self._met(setting)
            more = operations + setting.operations
            may_simulate = count < effort.simulated and more <= effort.simulated_operations
            uncertain = not setting.is_simulated and (setting.may_wait or effort.every_name)
            if not may_simulate and setting.may_wait:
                continue  # its estimate says too little
            is_last = not may_simulate and best is not None and best.is_simulated
            if uncertain and (may_simulate or is_last):
                operations, count = more, count + 1
                setting = self._asked.simulated(setting)
                self._known[setting_key(setting.name, setting.options)] = setting
            if setting.score < least:
                best, least = setting, setting.score
            if uncertain and is_last:
                break
        return self._simplest_of_ties(best, scored) if best else next(iter(scored), None)

    def _simplest_of_ties(self, best: Scored, scored: Sequence[Scored]) -> Scored:
        """Of the settings that are nearly as fast the one with the fewest operations of a rank: the
        model cannot tell them apart, and operations cost more than it knows of. Estimates of single
        rows that travel say too little for that."""
        enough = not best.fits, best.seconds * (1 + self._asked.effort.tie)
        ties = [best]
        for setting in scored:
            if setting.score > enough or setting.rank_operations >= best.rank_operations:
                continue
            known = self._known.get(setting_key(setting.name, setting.options))
            setting = self._met(known or setting)
            is_bound = setting.may_wait or METHODS[setting.name].by_stretches
            if setting.score <= enough and (setting.is_simulated or not is_bound):
                ties.append(setting)
        return min(ties, key=lambda setting: (setting.rank_operations, setting.score))


def _meets(method: Method) -> bool:
    """Whether ranks meet in rows and columns of a grid alone, so that its corners are enough."""
    return method.is_plain_box and not method.rotates


def _shape_key(method: str, options: Mapping[str, Any]) -> str:
    """All that is not about cuts."""
    return f"{method} {sorted((k, str(v)) for k, v in options.items() if k not in _CUTS)}"
