"""Searches the settings of one pass in one layout: which shapes and which cuts are tried.

1. Shapes, the most promising first, each in its first cut (`shapes.py`). A shape is left out when
   its bound exceeds the best score so far. The best shape of the other pass is tried too.
2. The best of these shapes in more cuts of their list.
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

from mesh_attention.choose.pass_scores import PassScores, shape_key
from mesh_attention.choose.scored import Score, Scored, SearchQuestion
from mesh_attention.choose.shapes import (
    Shape,
    coarser_and_finer,
    cuts_of,
    shapes_of,
    variants_of,
)
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.problem.layout import LayoutKind


class PassSearch:
    """The search of one pass in one layout; `scores` has the results."""

    def __init__(
        self, asked: SearchQuestion, direction: Direction, layout: LayoutKind | None
    ) -> None:
        self._asked, self._direction, self._layout = asked, direction, layout
        self.scores = PassScores(asked, direction, layout)
        self._taken: dict[int, tuple[Score, Shape]] = {}  # shapes by number, with their best scores
        # Programs of even chunks of thousands of ranks take seconds to make.
        few_ranks = asked.num_ranks <= asked.effort.ranks_of_even_chunks
        self._may_be_even = self.scores.ranks_wait and few_ranks

    @cached_property
    def _shapes(self) -> list[Shape]:
        return shapes_of(self._asked, self._direction, self._layout)

    @cached_property
    def _enough(self) -> Score:
        """The score at which the search may end: the bound of all shapes and the tolerance."""
        bound = min((shape.least_seconds for shape in self._shapes), default=0.0)
        return False, bound * (1 + self._asked.effort.tolerance)

    def run(self) -> None:
        self.look()
        self.cut()

    def look(self) -> None:
        """Tries the most promising shapes, each in its first cut."""
        effort, boxes = self._asked.effort, set[str]()
        for number, shape in enumerate(self._shapes):
            if len(self._taken) >= effort.shapes:
                break
            if shape.box in boxes and not effort.every_name:
                continue
            boxes.add(shape.box)
            self._look_at(number)

    def look_as(self, other: PassSearch) -> None:
        """Tries the best shape of the other pass: the best shape of both may not promise most for
        either, and a backward pass finds kept rows only where both passes have one setting."""
        if not other._taken:
            return
        best = other._shapes[other._best_first()[0]]
        for number, shape in enumerate(self._shapes):
            if (shape.name, shape.options) == (best.name, best.options):
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        shape = self._shapes[number]
        if number in self._taken or self._is_good_enough():
            return
        if self.scores.best is not None and self.scores.best < (False, shape.least_seconds):
            return
        shape, best_cut = self._first_cut(shape)
        if best_cut is not None:
            self._taken[number] = best_cut.score, shape

    def _best_first(self) -> list[int]:
        return sorted(self._taken, key=lambda number: (self._taken[number][0], number))

    def cut(self) -> None:
        """Tries more cuts of the best shapes."""
        effort = self._asked.effort
        for num_shapes, which in (
            (effort.in_four_cuts, slice(0, 4)),
            (effort.in_all_cuts, slice(4, effort.cuts)),
        ):
            for number in [n for n in self._best_first() if self._may_be_cut(n)][:num_shapes]:
                if self._is_good_enough():
                    break
                score, shape = self._taken[number]
                best_cut = self._try_cuts(shape, which)
                if best_cut is not None:
                    self._taken[number] = min(score, best_cut.score), shape
        for number in self._best_first()[: effort.refined]:
            self._refine(self._taken[number][1])
        self._try_variants()

    def _may_be_cut(self, number: int) -> bool:
        _, shape = self._taken[number]
        return len([*cuts_of(shape, self._direction, sparse=self.scores.sparse)]) > 1

    def _is_good_enough(self) -> bool:
        return self.scores.best is not None and self.scores.best <= self._enough

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
        for cut in [*cuts_of(shape, self._direction, sparse=self.scores.sparse)][which]:
            setting = {**shape.options, **cut}
            if self._prefers_even(shape, setting):
                setting["even_chunks"] = True
            tried.append(self.scores.attempt(shape.name, setting))
        taken = [scored for scored in tried if scored is not None]
        return min(taken, key=lambda scored: scored.score, default=None)

    def _refine(self, shape: Shape) -> None:
        """Goes from the best cut of a shape to a better neighbour, as long as that gains more than
        the tolerance. Neighbours have whole heads, fewer chunks or more chunks. More chunks gain
        less and less: they are tried only where fewer lose more than the tolerance."""
        best, enough = self._best_of(shape), math.inf
        while best is not None and best.seconds < enough:
            enough = best.seconds / (1 + self._asked.effort.tolerance)
            self._try_beside(shape, best)
            best = self._best_of(shape)

    def _best_of(self, shape: Shape) -> Scored | None:
        key = shape_key(shape.name, shape.options)
        return next((x for x in self.scores.scored if key == shape_key(x.name, x.options)), None)

    def _try_beside(self, shape: Shape, best: Scored) -> None:
        if "chunks" not in best.options or "chunks" in self._asked.options:
            return
        if "head_slices" in best.options and "head_slices" not in self._asked.options:
            whole = {name: v for name, v in best.options.items() if name != "head_slices"}
            self.scores.attempt(shape.name, whole)
        enough = best.seconds * (1 + self._asked.effort.tolerance)
        for fewer, more in coarser_and_finer(best.options["chunks"]):
            coarser = fewer and self.scores.attempt(shape.name, {**best.options, "chunks": fewer})
            if coarser is None or enough < coarser.seconds:
                self.scores.attempt(shape.name, {**best.options, "chunks": more})

    def _prefers_even(self, shape: Shape, setting: Mapping[str, Any]) -> bool:
        """Whether even chunks are tried at once: backward, chunks of uneven work cost more by
        waiting than even chunks by more calls."""
        if not self.scores.is_backward or not self._may_be_even or shape.tile == (1, 1):
            return False
        return any("even_chunks" in variant for variant in variants_of(setting, shape, even=True))

    def _try_variants(self) -> None:
        """Tries variants of the best cuts of the best shapes."""
        effort, shapes = self._asked.effort, [shape for _, shape in self._taken.values()]
        shape_of = {shape_key(shape.name, shape.options): shape for shape in shapes}
        cuts: dict[str, list[Scored]] = {}
        for scored in self.scores.scored:
            key = shape_key(scored.name, scored.options)
            if key in shape_of:
                cuts.setdefault(key, []).append(scored)
        for key in [*cuts][: effort.varied]:
            for scored in cuts[key][: effort.varied_cuts]:
                for setting in variants_of(scored.options, shape_of[key], even=self._may_be_even):
                    self.scores.attempt(scored.name, setting)
