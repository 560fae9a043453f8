"""From a cut of a shape to better ones: to neighbours while that helps, and to other shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mesh_attention.choose.cuts import Cut
from mesh_attention.choose.search import Score

NUM_REFINED = 2  # shapes that meet the cut found for the best one


class Tried(Protocol):
    """Settings of a method (`explored.py`)."""

    def attempt(self, setting: dict[str, Any]) -> Score | None:
        """How good it is; None where the method refuses it, or enough was tried."""
        ...

    def other_tiles(self, shape: dict[str, Any]) -> list[dict[str, Any]]:
        """Shapes that differ in their tile alone and may suit a cut better."""
        ...


def refine(
    tried: Tried,
    free: Sequence[str],
    held: Callable[[Mapping[str, Any]], int],
    ranking: Sequence[dict[str, Any]],
) -> None:
    """From the best of these settings, and with what is found there from the next best shape.
    `free`: the names of what is cut; `held`: KV heads that a rank has in a setting."""
    if not ranking:
        return
    shapes: list[dict[str, Any]] = []
    for setting in ranking:
        shape = {name: value for name, value in setting.items() if name not in free}
        if shape not in shapes:
            shapes.append(shape)
    first = shapes[0]
    best, lead = _climb(tried, first, Cut.of(ranking[0], held(ranking[0])), free)
    for shape in tried.other_tiles(first):
        for cut in dict.fromkeys((best, replace(best, chunks=best.chunks[::-1]))):
            score = tried.attempt(shape | cut.options(free))
            if score is not None and (lead is None or score < lead):
                first, best, lead = shape, cut, score
    if first != shapes[0]:
        best, lead = _climb(tried, first, best, free)
    for shape in shapes[1:NUM_REFINED]:
        here = replace(best, held=held(shape))
        score = tried.attempt(shape | here.options(free))
        if score is not None and (lead is None or score < lead):
            best, lead = _climb(tried, shape, here, free)


def _climb(
    tried: Tried, shape: dict[str, Any], cut: Cut, free: Sequence[str]
) -> tuple[Cut, Score | None]:
    """From a cut to better neighbours until there are none."""
    best, score = cut, tried.attempt(shape | cut.options(free))
    while True:
        found = best
        for near in best.neighbours():
            other = tried.attempt(shape | near.options(free))
            if other is not None and (score is None or other < score):
                found, score = near, other
        if found == best:
            return best, score
        best = found
