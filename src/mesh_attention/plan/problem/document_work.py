"""The work of the first rows of a document under the masks of all layers, for `balance.py`.

A document of a batch has the same tokens as queries and keys, so the pairs that its first rows see
are a few terms in closed form, whatever the length.
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
    growing = min(max(length - ahead, 0), row)  # so many rows do not see the last key
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
    """Pairs of all layers, each by its weight.

    folded   late rows of a long document have more (or less) work than early rows, so its tokens
             are dealt out from both ends. Windows have even work anyway, and see less of other
             ranks' tokens in one stretch.
    even     dealt out like that, all tokens have equal work
    """

    def __init__(self, masks: Sequence[Mask], weights: Sequence[float] | None = None) -> None:
        costs: dict[Mask, float] = {}  # layers with equal masks are counted once
        for mask, weight in zip(masks, weights or [1.0] * len(masks), strict=True):
            costs[mask] = costs.get(mask, 0.0) + weight
        self._costs = tuple(costs.items())
        self.folded = any(map(_is_one_sided, costs))
        self.even = all(not m.window and not m.prefix and m.causal == self.folded for m in costs)
        # `before` is asked thousands of times: causal masks take fewer steps than `pairs_before`.
        self._causal = all(m.causal and not m.prefix for m in costs)
        self._weight = sum(costs.values())
        sides = [(m.window[0] if m.window else None, w) for m, w in self._costs]
        self._windows = [(left, weight) for left, weight in sides if left is not None]

    def before(self, row: int, length: int) -> float:
        """The work of the rows before `row`."""
        if not self._causal:
            return sum([weight * pairs_before(mask, row, length) for mask, weight in self._costs])
        work = self._weight * row * (row + 1) / 2
        for left, weight in self._windows:
            hidden = row - left
            if hidden > 1:
                work -= weight * hidden * (hidden - 1) / 2
        return work

    def of(self, spans: Sequence[tuple[int, int]], length: int) -> float:
        """The work of some stretches of rows."""
        return sum([self.before(b, length) - self.before(a, length) for a, b in spans])
