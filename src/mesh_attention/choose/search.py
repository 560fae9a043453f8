"""One pass: shapes in the order of their promise, cuts of the best, the best few simulated.

1. Shapes (`shapes.py`), the most promising first, each in its first cut, by what the busiest rank
   sees of it (`cost/estimate.py`). A shape is left out when its bound exceeds the best so far.
2. The best of them in three more cuts, the best of these in more of their list (`cuts.py`), and the
   best settings with a short start, with even chunks and with gradients added inside nodes.
3. The best settings simulated with all ranks, in the order of their estimates, until no other
   estimate is shorter than the best simulation.

`SearchEffort` says how many in each step. `auto.py` runs a search for each pass and layout. Nothing
here looks at a clock: ranks choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mesh_attention.choose.busiest import busiest_ranks, shows_little
from mesh_attention.choose.cuts import cuts_of, variants_of
from mesh_attention.choose.scored import Score, Scored, SearchQuestion, gpu_bytes, place_of
from mesh_attention.choose.shapes import Shape, setting_key, shapes_of
from mesh_attention.cost.estimate import estimate
from mesh_attention.cost.planning import PLACES, tokens_stay
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Role
from mesh_attention.plan.language.plan import Direction, Plan
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

# Simulated over estimated seconds of chunks that both halves of a zigzag share: at most 1.09. What
# was exchanged for heads is chunked half by half, and up to 1.33 times as slow as its estimate.
_WAITING = 1.07


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
        self._best: Score | None = None
        self._sure: Score | None = None  # the best without waits that one rank does not see
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

    def run(self, *, stays: bool) -> None:
        """`stays`: only settings that leave tokens where they are."""
        asked = self._asked
        shapes = shapes_of(
            asked.problem,
            asked.num_ranks,
            asked.cluster,
            self._direction,
            asked.methods,
            asked.options,
            self._layout,
        )
        placed = any(asked.options.get(name) is not None for name in PLACES)
        self._look_at([shape for shape in shapes if placed or not shape.moves_tokens])
        if not stays and not placed:
            self._look_at([shape for shape in shapes if shape.moves_tokens])

    def _look_at(self, shapes: Sequence[Shape]) -> None:
        effort = self._asked.effort
        bound = min((shape.least_seconds for shape in shapes), default=0.0)
        enough = (False, bound * (1 + effort.tolerance))
        taken: list[tuple[Score, int]] = []  # and the number of the shape
        # Programs of even chunks take four times as long to make.
        all_even = self._asked.num_ranks <= effort.ranks_of_even_variants
        boxes: set[str] = set()
        for number, shape in enumerate(shapes):
            if len(taken) >= effort.shapes:
                break
            if shape.box in boxes and not effort.every_name:
                continue
            boxes.add(shape.box)
            if self._best is not None and self._best < (False, shape.least_seconds):
                continue
            if self._is_sure_of(enough):
                break
            best_cut = self._try_cuts(shape, slice(0, 1))
            if best_cut is not None:
                taken.append((best_cut.score, number))
        for num_shapes, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            taken.sort()
            for at, (score, number) in enumerate(taken[:num_shapes]):
                if self._is_sure_of(enough):
                    break
                best_cut = self._try_cuts(shapes[number], which, even=all_even)
                if best_cut is not None:
                    taken[at] = min(score, best_cut.score), number
        for _, number in () if all_even else sorted(taken)[: effort.in_four_cuts]:
            self._make_even(shapes[number])
        self._try_variants(shapes)

    def _is_sure_of(self, enough: Score) -> bool:
        return self._sure is not None and self._sure <= enough

    def _try_cuts(self, shape: Shape, which: slice, *, even: bool = False) -> Scored | None:
        """The best of these cuts of a shape; `even`: with even chunks where they are better."""
        tried = []
        for cut in [*cuts_of(shape, self._direction, sparse=self._sparse)][which]:
            setting = {**shape.options, **cut}
            if even and self._prefers_even(shape, setting):
                setting["even_chunks"] = True
            tried.append(self.attempt(shape.name, setting))
        taken = [scored for scored in tried if scored is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _prefers_even(self, shape: Shape, setting: Mapping[str, Any]) -> bool:
        """Backward, chunks of unlike work cost more in waiting than even ones do in calls."""
        if not self._is_backward or not self._may_be_even or shape.tile == (1, 1):
            return False
        return any("even_chunks" in variant for variant in variants_of(setting, shape, even=True))

    def _make_even(self, shape: Shape) -> None:
        """The two best cuts of a shape: one rank takes about as long with even chunks."""
        key = _shape_key(shape.name, shape.options)
        cuts = [x.options for x in self.scored if key == _shape_key(x.name, x.options)]
        for cut in [cut for cut in cuts if self._prefers_even(shape, cut)][:2]:
            self.attempt(shape.name, {**cut, "even_chunks": True})

    def _try_variants(self, shapes: Sequence[Shape]) -> None:
        """Of the best cuts of the best of these shapes."""
        effort = self._asked.effort
        shape_of = {_shape_key(shape.name, shape.options): shape for shape in shapes}
        cuts: dict[str, list[Scored]] = {}
        for scored in self.scored:
            key = _shape_key(scored.name, scored.options)
            if key in shape_of:
                cuts.setdefault(key, []).append(scored)
        even = self._may_be_even and self._asked.num_ranks <= effort.ranks_of_even_variants
        ranks, per_node = self._asked.num_ranks, self._asked.cluster.node.ranks
        for key in [*cuts][: effort.varied]:
            shape = shape_of[key]
            # Backward, attention of a slice outlasts its first transfers.
            starts_late = self._is_backward and shape.held > 1 and not effort.every_name
            far = self._is_backward and ranks > per_node > shape.degree * shape.tile[0]
            for scored in cuts[key][: effort.varied_cuts]:
                for setting in variants_of(scored.options, shape, even=even, reduces_far=far):
                    if not starts_late or "combine" in setting:
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
        if scored is not None:
            self._best = min(self._best or scored.score, scored.score)
            if not scored.may_wait:
                self._sure = min(self._sure or scored.score, scored.score)
        self._asked.report()
        return scored

    def _estimated(self, plan: Plan, method: str, setting: dict[str, Any]) -> Scored:
        asked = self._asked
        ranks = busiest_ranks(plan, method, setting, asked.cluster.node.ranks)
        seen = estimate(
            plan,
            asked.cluster,
            self._direction,
            overlap=asked.overlap,
            kernel=asked.kernel,
            ranks=sorted(ranks),
        )
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
            place=place_of(plan),
            stays=tokens_stay(plan, asked.options),
            operations=seen.num_operations // copies,
            may_wait=self._may_wait(METHODS[method], setting),
            recalls=self._is_backward and bool(between),
            others_bytes=others_bytes,
        )

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
        shapes do, so the best of each shape come first."""
        effort, operations, count = self._asked.effort, 0, 0
        best, least = None, (True, math.inf)
        if self._is_backward and not effort.every_name:
            # Even chunks were tried in their place, and need no simulation.
            evens = [x.name for x in scored if x.options.get("even_chunks")]
            scored = [x for x in scored if not x.may_wait or x.name not in evens]
        firsts: dict[str, Scored] = {}
        for setting in scored:
            firsts.setdefault(_shape_key(setting.name, setting.options), setting)
        rest = [setting for setting in scored if setting not in firsts.values()]
        for setting in (*firsts.values(), *rest):
            if least <= setting.score:
                continue
            if setting.timeline is None and (setting.may_wait or effort.every_name):
                if least <= (not setting.fits, setting.seconds * (1 + effort.tolerance)):
                    continue  # too little to gain
                more = operations + setting.operations
                if count < effort.simulated and more <= effort.simulated_operations:
                    operations, count = more, count + 1
                    setting = self._asked.simulated(setting)
                    self._known[setting_key(setting.name, setting.options)] = setting
                elif setting.may_wait and _may_wait_long(setting):
                    continue  # its estimate says too little
            score = not setting.fits, setting.seconds * (_WAITING if setting.may_wait else 1.0)
            if score < least:
                best, least = setting, score
        return best or next(iter(scored), None)


def _may_wait_long(setting: Scored) -> bool:
    """Whether it has chunks of what was exchanged for heads, or rings."""
    method, degree = METHODS[setting.name], setting.options.get("ulysses") or 1
    return degree > 1 or method.rotates or not method.is_plain_box


def _shape_key(method: str, options: Mapping[str, Any]) -> str:
    """All that is not about cuts."""
    return f"{method} {sorted((k, str(v)) for k, v in options.items() if k not in _CUTS)}"
