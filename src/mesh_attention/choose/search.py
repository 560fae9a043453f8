"""Searches the settings of one pass in one layout: which shapes and which cuts are tried.

1. Shapes, the most promising first, each in its first cut (`shapes.py`). A shape is left out when
   its bound exceeds the best score so far. The best shape of the other pass is tried too.
2. The best of these shapes in more cuts of their list, unless as many are refined (3).
3. Coarser cuts than the best, and finer cuts where coarser cuts lose, and so on from the new best
   as long as that gains and takes much longer than the bound; a short start and even chunks where
   the effort says so.

`pass_scores.py` scores each setting, and simulates the best few with all ranks. `SearchEffort` says
how many each step tries. `passes_together.py` and `tuning.py` run searches. Nothing here reads a
clock, so all ranks choose alike.
"""

from __future__ import annotations

import math
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

_MUCH = 1.25  # times the bound of a shape: what takes longer may gain from being cut otherwise


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

    def look(self) -> None:
        """Tries the most promising shapes, each in its first cut."""
        most, boxes = self.effort.shapes, set[str]()
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

    def begin_as(self, other: PassSearch, key: str) -> None:
        """Tries the best cut that the other pass has of the shape with this key."""
        for _, shape in self._taken.values():
            best = other._best_of(shape) if shape.key == key else None
            if best is not None:
                self.scores.attempt(best.name, dict(best.options))

    def cut(self, first: str | None = None) -> None:
        """Tries more cuts of the best shapes, that with the key `first` before others."""
        effort = self.effort
        for num_shapes, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            for number in self._best_to_cut(num_shapes, first):
                if self._is_good_enough():
                    break
                scored, shape = self._taken[number]
                if effort.refined >= effort.in_four_cuts and "chunks" in scored.options:
                    continue  # from one neighbour to the next it is cut more directly
                best_cut = self._try_cuts(shape, which)
                if best_cut is not None and best_cut.score < scored.score:
                    self._taken[number] = best_cut, shape
        for number in self._best_to_cut(effort.refined, first):
            self._refine(self._taken[number][1])
        self._try_variants()

    def _best_to_cut(self, count: int, first: str | None) -> list[int]:
        """The best shapes of those that can be cut."""
        numbers = [number for number in self._best_first(count) if self._may_be_cut(number)]
        return sorted(numbers, key=lambda number: self._taken[number][1].key != first)[:count]

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
        """The best of these cuts of a shape."""
        cuts = [*cuts_of(shape, self.direction, sparse=self.scores.sparse)][which]
        tried = [self._try_cut(shape, {**shape.options, **cut}) for cut in cuts]
        taken = [scored for scored in tried if scored is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _try_cut(self, shape: Shape, setting: dict[str, Any]) -> Scored | None:
        """Tries a setting, with even chunks where they may pay: backward, chunks of uneven work
        cost more by waiting than even chunks by more calls."""
        variants = variants_of(setting, shape, even=self._may_be_even)
        evenly = [variant for variant in variants if "even_chunks" in variant]
        if not evenly or not self.scores.is_backward or shape.tile == (1, 1):
            return self.scores.attempt(shape.name, setting)
        even = self.scores.attempt(shape.name, evenly[0])
        if even is not None and even.busy_seconds <= _MUCH * shape.least_seconds:
            return even
        taken = [x for x in (even, self.scores.attempt(shape.name, setting)) if x is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _refine(self, shape: Shape) -> None:
        """Goes from the best cut of a shape to a better neighbour, as long as that gains more than
        the tolerance, and it takes much longer than the bound. Neighbours have whole heads, fewer
        chunks or more chunks. More chunks gain less and less: they are tried only where fewer lose
        more than the tolerance. Even chunks of the last are compared with uneven ones."""
        best, enough, much = self._best_of(shape), math.inf, _MUCH * shape.least_seconds
        while best is not None and much < best.seconds < enough:
            enough = best.seconds / (1 + self.effort.tolerance)
            self._try_beside(shape, best)
            best = self._best_of(shape)
        if best is not None and "even_chunks" in {*best.options} - {*self._asked.options}:
            uneven = {name: x for name, x in best.options.items() if name != "even_chunks"}
            self.scores.attempt(shape.name, uneven)

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
        for fewer, more in coarser_and_finer(best.options["chunks"]):
            coarser = fewer and self.scores.attempt(shape.name, {**best.options, "chunks": fewer})
            if coarser is None or enough < coarser.seconds:
                self.scores.attempt(shape.name, {**best.options, "chunks": more})

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
