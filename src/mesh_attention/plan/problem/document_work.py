"""The work of the first rows of a document under the masks of all layers, for `balance.py`.

A document of a batch has the same tokens as queries and keys, so a short formula counts the pairs
that its first rows see, whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_attention.plan.problem.mask import Mask


def pairs_before(mask: Mask, row: int, length: int) -> int:
    """Visible pairs of the rows before `row` of a document, whose keys are its own tokens.

    >>> pairs_before(Mask(causal=True), 4, 10)
    10
    >>> pairs_before(Mask(causal=True, window=(1, 0)), 4, 10)
    7
    """
    left, right = mask.window or (None, None)
    ahead = length if right is None else right + 1  # row p sees keys before p + ahead
    if mask.causal:
        ahead = 1
    growing = min(max(length - ahead, 0), row)  # rows that do not see the last key
    pairs = growing * (growing - 1) // 2 + ahead * growing + (row - growing) * length
    if mask.prefix:
        prefix = min(mask.prefix, length)
        inside = min(row, prefix)
        pairs += inside * prefix - inside * (inside + 1) // 2
    if left is not None:
        hidden = max(row - left, 0)  # row p does not see the first p - left keys
        pairs -= hidden * (hidden - 1) // 2
    return pairs


def _is_one_sided(mask: Mask) -> bool:
    left, right = mask.window or (None, None)
    return (left is None) != (right is None and not mask.causal)


class DocumentWork:
    """Work is the visible pairs of all layers, each layer by its weight.

    folded   tokens of a long document are dealt out from both ends, since late rows have more (or
             less) work than early rows. Windows stay in one stretch: their work is even anyway, and
             so they see fewer tokens of other ranks.
    even     dealt out so, all tokens have equal work
    """

    def __init__(self, masks: Sequence[Mask], weights: Sequence[float] | None = None) -> None:
        totals: dict[Mask, float] = {}  # layers with equal masks are counted once
        for mask, weight in zip(masks, weights or [1.0] * len(masks), strict=True):
            totals[mask] = totals.get(mask, 0.0) + weight
        self._weights = tuple(totals.items())
        self.folded = any(map(_is_one_sided, totals))
        self.even = all(not m.window and not m.prefix and m.causal == self.folded for m in totals)
        # `before` is asked thousands of times: causal masks take fewer steps than `pairs_before`.
        self._causal = all(m.causal and not m.prefix for m in totals)
        self._total_weight = sum(totals.values())
        sides = [(m.window[0], w) for m, w in self._weights if m.window]
        self._windows = [(left, weight) for left, weight in sides if left is not None]

    def before(self, row: int, length: int) -> float:
        """The work of the rows before `row`."""
        if not self._causal:
            return sum([weight * pairs_before(mask, row, length) for mask, weight in self._weights])
        work = self._total_weight * row * (row + 1) / 2
        for left, weight in self._windows:
            hidden = row - left
            if hidden > 1:
                work -= weight * hidden * (hidden - 1) / 2
        return work

    def of(self, spans: Sequence[tuple[int, int]], length: int) -> float:
        """The work of the rows in these stretches of a document."""
        return sum([self.before(b, length) - self.before(a, length) for a, b in spans])
