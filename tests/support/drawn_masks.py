"""Masks of every kind by chance, each with what it shows, written pair by pair from its words.

`draw` is a `random.Random`, or what Hypothesis has in its place. Nothing here reads row ranges, nor
the slices that `Mask.tree` and its like make: an error of theirs cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from mesh_attention import Mask
from mesh_attention.plan.problem.mask_slices import SliceKind
from support.reference import visible

__all__ = ["DrawnMask", "drawn_mask", "drawn_starts", "drawn_within"]


@dataclass(frozen=True)
class DrawnMask:
    mask: Mask
    shown: Tensor  # (q_tokens, kv_tokens)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.shown.shape[0], self.shown.shape[1]


def drawn_mask(draw: Random, tokens: int) -> DrawnMask:
    kinds = (_one_interval, _one_interval, _documents, _documents, _documents)
    return draw.choice((*kinds, _slices, _tree, _global_tokens, _frames))(draw, tokens)


def drawn_starts(draw: Random, tokens: int, documents: int) -> tuple[int, ...]:
    """Some documents have one token and some none."""
    cuts = [0]
    for _ in range(documents - 1):
        near = draw.randint(0, 2) == 0
        cuts.append(min(tokens, cuts[-1] + draw.randint(0, 1)) if near else draw.randint(0, tokens))
    return (*sorted(cuts), tokens)


def _kv_tokens(draw: Random, tokens: int) -> int:
    return tokens if draw.randint(0, 2) else draw.randint(1, tokens + 4)


def drawn_within(draw: Random, most: int) -> dict[str, Any]:
    """What is seen of a document: combinations that `Mask` allows."""
    causal = draw.randint(0, 2) > 0

    def side() -> int | None:
        return draw.choice((None, 0, 1, draw.randint(0, most)))

    match draw.randint(0, 3 if causal else 1):
        case 0:
            return {"causal": causal}
        case 1:
            return {"causal": causal, "window": (side(), side())}
        case 2:
            return {"causal": causal, "window": (draw.randint(0, most), 0)}
    return {"causal": True, "prefix": draw.randint(0, most)}


def _one_interval(draw: Random, tokens: int) -> DrawnMask:
    sizes = tokens, _kv_tokens(draw, tokens)
    mask = Mask(**drawn_within(draw, tokens))
    return DrawnMask(mask, visible(mask, *sizes))


def _documents(draw: Random, tokens: int) -> DrawnMask:
    number = draw.randint(1, min(tokens, 7) + 1)
    packed: dict[str, Any] = {"documents": drawn_starts(draw, tokens, number)}
    keys = tokens
    if draw.randint(0, 3) == 0:
        keys = _kv_tokens(draw, tokens)
        packed["kv_documents"] = drawn_starts(draw, keys, number)
    mask = Mask(**packed, **drawn_within(draw, 5))
    return DrawnMask(mask, visible(mask, tokens, keys))


def _slices(draw: Random, tokens: int) -> DrawnMask:
    sizes = tokens, _kv_tokens(draw, tokens)

    def stretch(most: int) -> tuple[int, int]:
        first, last = sorted(draw.randint(0, most) for _ in range(2))
        return first, last

    mask = Mask(
        slices=tuple(
            (stretch(sizes[0]), stretch(sizes[1]), draw.choice(tuple(SliceKind)).value)
            for _ in range(draw.randint(0, 5))
        )
    )
    return DrawnMask(mask, visible(mask, *sizes))


def _dense(mask: Mask, tokens: int, sees: Callable[[int, int], bool]) -> DrawnMask:
    rows = [[sees(q, k) for k in range(tokens)] for q in range(tokens)]
    return DrawnMask(mask, torch.tensor(rows))


def _tree(draw: Random, tokens: int) -> DrawnMask:
    cuts = drawn_starts(draw, tokens, draw.randint(1, 6))
    lengths = [b - a for a, b in pairwise(cuts)]
    parents = [draw.choice((None, *range(node))) for node in range(len(lengths))]
    node_of = [node for node, length in enumerate(lengths) for _ in range(length)]

    def sees(q: int, k: int) -> bool:
        node: int | None = node_of[q]
        while node is not None and node != node_of[k]:
            node = parents[node]
        return node is not None and k <= q

    return _dense(Mask.tree(parents, lengths), tokens, sees)


def _global_tokens(draw: Random, tokens: int) -> DrawnMask:
    first, left, right = (draw.randint(0, tokens), draw.randint(0, 6), draw.randint(0, 6))
    causal = draw.randint(0, 1) == 1
    mask = Mask.with_global_tokens(tokens, first, (left, right), causal=causal)

    def sees(q: int, k: int) -> bool:
        if causal:
            return k <= q and (k < first or q < first or k >= q - left)
        return min(q, k) < first or -left <= k - q <= right

    return _dense(mask, tokens, sees)


def _frames(draw: Random, tokens: int) -> DrawnMask:
    frame, seen = draw.randint(1, 5), draw.choice((None, 1, 2, 3))
    mask = Mask.block_causal(tokens, frame, frames_seen=seen)
    last = tokens if seen is None else seen
    return _dense(mask, tokens, lambda q, k: 0 <= q // frame - k // frame < last)
