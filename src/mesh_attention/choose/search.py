"""Searches the settings of one pass in one layout: which shapes and which cuts are tried.

1. Shapes, the most promising first, each in its first cut (`shapes.py`). A shape is left out when
   its bound exceeds the best score so far. The best shape of the other pass is tried too.
2. The best of these shapes in more cuts of their list, unless as many are refined (3).
3. Coarser cuts than the best, and finer cuts where coarser cuts lose, and so on from the new best
   as long as that gains; a short start and even chunks where the effort says so.

`pass_scores.py` scores each setting, and simulates the best few with all ranks. `SearchEffort` says
how many each step tries. `passes_together.py` and `tuning.py` run searches. Nothing here reads a
clock, so all ranks choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from mesh_attention.choose.pass_scores import PassScores
from mesh_attention.choose.scored import Score, Scored, SearchQuestion
from mesh_attention.choose.shapes import (
    Shape,
    coarser_and_finer,
    cuts_of,
    shape_key,
    shapes_of,
    variants_of,
)
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.layout import LayoutKind

_MUCH = 1.25  # so much more computation than the bound says may be for the way of cutting
_BUSY = 0.8  # of the time: then more chunks have little to hide


class PassSearch:
    """The search of one pass in one layout; `scores` has the results."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
    ) -> None:
        self._asked, self.direction, self._layout = asked, direction, layout
        self.effort = asked.effort
        self.scores = PassScores(asked, direction, layout)
        self._taken: dict[int, tuple[Scored, Shape]] = {}  # shapes by number, with their best cuts
        # Programs of even chunks of thousands of ranks take seconds to make.
        few_ranks = asked.num_ranks <= asked.effort.ranks_of_even_chunks
        self._may_be_even = self.scores.ranks_wait and few_ranks

    @cached_property
    def _shapes(self) -> list[Shape]:
        return shapes_of(self._asked, self.direction, self._layout)

    @cached_property
    def _enough(self) -> Score:
        """The score at which the search may end: the bound of all shapes and the tolerance."""
        bound = min((shape.least_seconds for shape in self._shapes), default=0.0)
        return False, bound * (1 + self.effort.tolerance)

    def run(self) -> None:
        self.look()
        self.cut()

    def look(self, most: int | None = None) -> None:
        """Tries the most promising shapes, each in its first cut. `most`: so many, if not as many
        as the effort says."""
        most, boxes = most or self.effort.shapes, set[str]()
        for number, shape in enumerate(self._shapes):
            if len(self._taken) >= most:
                break
            if shape.box in boxes and not self.effort.every_name:
                continue
            boxes.add(shape.box)
            self._look_at(number)

    def look_as(self, other: PassSearch) -> None:
        """Tries the best shape of the other pass: the best shape of both may not promise most for
        either, and a backward pass finds kept rows only where both passes have one setting."""
        if not other._taken:
            return
        best = other._shapes[other._best_first(1)[0]]
        for number, shape in enumerate(self._shapes):
            if (shape.name, shape.options) == (best.name, best.options):
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        shape = self._shapes[number]
        if number in self._taken or self._is_good_enough():
            return
        if self.scores.is_under((False, shape.least_seconds)):
            return
        shape, best_cut = self._first_cut(shape)
        if best_cut is not None:
            self._taken[number] = best_cut, shape

    def _best_first(self, count: int) -> list[int]:
        """The shapes taken, the best first. Of the first `count` it is known how long ranks wait
        for each other."""
        taken, scores = self._taken, self.scores
        while True:
            latest = {number: scores.latest(scored) for number, (scored, _) in taken.items()}
            best_first = sorted(taken, key=lambda number: (latest[number].score, number))
            if all(scores.met(latest[number]) is latest[number] for number in best_first[:count]):
                return best_first

    def taken(self) -> dict[str, Scored]:
        """The best cut of each shape taken, by its key, the best shape first."""
        taken = [self._taken[number] for number in self._best_first(1)]
        return {shape.key: self.scores.latest(scored) for scored, shape in taken}

    def cut(self, only: str | None = None) -> None:
        """Tries more cuts of the best shapes, or of the shape with the key `only`."""
        effort = self.effort
        if only is not None:
            self._taken = {n: x for n, x in self._taken.items() if x[1].key == only}
        for num_shapes, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            for number in self._best_to_cut(num_shapes):
                if self._is_good_enough():
                    break
                scored, shape = self._taken[number]
                if effort.refined >= effort.in_four_cuts and "chunks" in scored.options:
                    continue  # from one neighbour to the next it is cut more directly
                best_cut = self._try_cuts(shape, which)
                if best_cut is not None and best_cut.score < scored.score:
                    self._taken[number] = best_cut, shape
        for number in self._best_to_cut(effort.refined):
            self._refine(self._taken[number][1])
        self._try_variants()

    def cut_as(self, other: PassSearch, only: str) -> None:
        """Tries the best cut that the other pass has of the shape with the key `only`, and goes on
        from its own best if transfers are still to be hidden."""
        for shape in [shape for _, shape in self._taken.values() if shape.key == only]:
            best = other._best_of(shape)
            if best is not None:
                self.scores.attempt(best.name, dict(best.options))
            own = self._best_of(shape)
            if own is not None and _idles(own):
                self._refine(shape)

    def _best_to_cut(self, count: int) -> list[int]:
        """The best shapes of those that can be cut."""
        return [number for number in self._best_first(count) if self._may_be_cut(number)][:count]

    def _may_be_cut(self, number: int) -> bool:
        _, shape = self._taken[number]
        return len([*cuts_of(shape, self.direction, sparse=self.scores.sparse)]) > 1

    def _is_good_enough(self) -> bool:
        return self.scores.is_under(self._enough)

    def _first_cut(self, shape: Shape) -> tuple[Shape, Scored | None]:
        """The best setting in the first cut, and its shape, which adds gradients of keys inside
        nodes first if that is faster."""
        first = self._try_cuts(shape, slice(0, 1))
        best_cut = self.scores.best_sums(first)
        if best_cut is first or best_cut is None:
            return shape, best_cut
        options = {**shape.options, "combine": best_cut.options["combine"]}
        return replace(shape, options=options), best_cut

    def _try_cuts(self, shape: Shape, which: slice) -> Scored | None:
        """The best of these cuts of a shape, with even chunks where they are better."""
        tried = []
        for cut in [*cuts_of(shape, self.direction, sparse=self.scores.sparse)][which]:
            setting = {**shape.options, **cut}
            if self._prefers_even(shape, setting):
                even = self.scores.attempt(shape.name, {**setting, "even_chunks": True})
                tried.append(even)
                if even is not None and even.busy_seconds <= _MUCH * shape.least_seconds:
                    continue
            tried.append(self.scores.attempt(shape.name, setting))
        taken = [scored for scored in tried if scored is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _refine(self, shape: Shape) -> None:
        """Goes from the best cut of a shape to a better neighbour, as long as that gains more than
        the tolerance. Neighbours have whole heads, fewer chunks or more chunks. More chunks gain
        less and less: they are tried only where fewer lose more than the tolerance, and, of many
        ranks, where computation waits for transfers."""
        best, enough = self._best_of(shape), math.inf
        while best is not None and best.seconds < enough:
            enough = best.seconds / (1 + self.effort.tolerance)
            self._try_beside(shape, best)
            best = self._best_of(shape)

    def _best_of(self, shape: Shape) -> Scored | None:
        key = shape.key
        return next((x for x in self.scores.scored if key == shape_key(x.name, x.options)), None)

    def _try_beside(self, shape: Shape, best: Scored) -> None:
        if "chunks" not in best.options or "chunks" in self._asked.options:
            return
        if "head_slices" in best.options and "head_slices" not in self._asked.options:
            whole = {name: v for name, v in best.options.items() if name != "head_slices"}
            self.scores.attempt(shape.name, whole)
        enough = best.seconds * (1 + self.effort.tolerance)
        may_gain = not self.effort.forward_shapes or _idles(best)
        for fewer, more in coarser_and_finer(best.options["chunks"]):
            coarser = fewer and self.scores.attempt(shape.name, {**best.options, "chunks": fewer})
            if may_gain and (coarser is None or enough < coarser.seconds):
                self.scores.attempt(shape.name, {**best.options, "chunks": more})

    def _prefers_even(self, shape: Shape, setting: Mapping[str, Any]) -> bool:
        """Whether even chunks are tried at once: backward, chunks of uneven work cost more by
        waiting than even chunks by more calls."""
        if not self.scores.is_backward or not self._may_be_even or shape.tile == (1, 1):
            return False
        return any("even_chunks" in variant for variant in variants_of(setting, shape, even=True))

    def _try_variants(self) -> None:
        """Tries variants of the best cuts of the best shapes."""
        effort, shapes = self.effort, [shape for _, shape in self._taken.values()]
        shape_of = {shape.key: shape for shape in shapes}
        cuts: dict[str, list[Scored]] = {}
        for scored in self.scores.scored:
            key = shape_key(scored.name, scored.options)
            if key in shape_of:
                cuts.setdefault(key, []).append(scored)
        for key in [*cuts][: effort.varied]:
            for scored in cuts[key][: effort.varied_cuts]:
                for setting in variants_of(scored.options, shape_of[key], even=self._may_be_even):
                    self.scores.attempt(scored.name, setting)


def _idles(scored: Scored) -> bool:
    """Whether computation waits long enough for transfers that more chunks may pay."""
    return scored.busy_seconds < _BUSY * scored.seconds
