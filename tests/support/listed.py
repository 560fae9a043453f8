"""Listed layouts drawn by seed, and the layouts that need no list."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from mesh_attention.plan.problem.layout import LayoutKind, Stretches

__all__ = ["RULES", "stretches_for"]

RULES = tuple(kind for kind in LayoutKind if kind is not LayoutKind.LISTED)


def _any_stretches(draw: Random, tokens: int, ranks: int) -> Stretches:
    """Any stretches on any ranks in any order, so that some ranks have none and most are padded."""
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(3 * ranks))})
    owned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        owned[draw.randrange(ranks)].append((start, stop))
    for own in owned:
        draw.shuffle(own)
    return tuple(map(tuple, owned))


def stretches_for(
    layout: LayoutKind | str | None, draw: Random, tokens: int, ranks: int
) -> Stretches | None:
    """What a layout of this kind needs."""
    return _any_stretches(draw, tokens, ranks) if layout == LayoutKind.LISTED else None
