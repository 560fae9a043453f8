"""A pack of documents shared out such that tokens and work are even, and most documents whole.

Two things make it exact. A share f of a causal document, taken as a pair of stretches from its
front and from its end, {[a, b), [L-b, L-a)}, holds f of its tokens and f of its work. And what
rank after rank leaves over always has the mean density (work per token), so there are always
tokens denser and tokens sparser than what a rank still needs, and a share of each makes it even.

Ranks are filled one after the other with whole documents: the longest that leaves a rest which
others can fill, then ones as dense as that rest, and at last two that make it even. Where no whole
documents do, up to the slack, shares of two documents do. Targets are cumulative: what one rank is
short of the next one has, and nothing adds up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.document_work import DocumentWork
from mesh_attention.plan.problem.layout import Stretches
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.spans import joined

# How far the ranks filled so far may be from their share before a document is cut to meet it: so a
# rank differs by at most twice as much. Padding costs memory and rows, uneven work costs time.
TOKEN_SLACK = 0.0075
WORK_SLACK = 0.015

# Kernels work on blocks of rows: cuts fall on multiples of this, counted from the document's start,
# where shards are so long that the balance does not feel it.
ALIGN = 8
_LONG_SHARD = 4096
_ENOUGH = 24  # of fewer documents no two are likely to make a rank even


def balanced_stretches(
    documents: Sequence[int],
    num_ranks: int,
    masks: Sequence[Mask],
    weights: Sequence[float] | None = None,
) -> Stretches:
    """The positions of each rank, for documents given by their cumulative starts. `masks` are those
    of the layers inside a document; `weights`, how much a pair of each costs.

    >>> balanced_stretches((0, 16), 2, [Mask(causal=True)])  # one document: a zigzag
    (((0, 4), (12, 16)), ((4, 12),))
    >>> balanced_stretches((0, 4, 8, 12, 16), 2, [Mask(causal=True)])
    (((0, 8),), ((8, 16),))
    """
    if len(documents) < 2 or documents[0] != 0 or documents[-1] < 1:
        raise PlanError(
            f"documents={tuple(documents)}: give cumulative starts (0, ..., number of tokens)"
        )
    if num_ranks < 1:
        raise PlanError(f"ranks={num_ranks}: must be a whole number of at least 1")
    left = _Left(documents, num_ranks, masks, weights)
    return tuple(joined(sorted(left.next_rank())) for _ in range(num_ranks))


@dataclass(slots=True, eq=False)
class _Document:
    """What is left of a document: so many tokens, the last ones. Where late rows have more to do
    they are numbered from both ends: first, last, second, last but one."""

    start: int
    length: int
    work: float
    tokens: int
    density: float


_density = attrgetter("density")


class _Front:
    """The work of the first tokens of whole documents in some order, up to a number of tokens.

    size    of those documents
    reach   tokens up to which it is known
    """

    __slots__ = ("_densities", "_tokens", "_works", "reach", "size")

    def __init__(self, documents: Iterable[_Document], up_to: int) -> None:
        tokens, work = 0, 0.0
        self._tokens, self._works, self._densities = [0], [0.0], list[float]()
        self.reach = math.inf  # where there are no others
        for one in documents:
            tokens += one.length
            work += one.work
            self._tokens.append(tokens)
            self._works.append(work)
            self._densities.append(one.density)
            if tokens >= up_to:
                self.reach = tokens
                break
        self.size = len(self._densities)
        self._densities.append(0.0)  # past the last

    def work(self, tokens: int) -> float:
        at = bisect_right(self._tokens, tokens) - 1
        return self._works[at] + (tokens - self._tokens[at]) * self._densities[at]


class _Left:
    """What no rank has yet: whole documents, longest and so densest first, and cut ones."""

    def __init__(
        self,
        documents: Sequence[int],
        num_ranks: int,
        masks: Sequence[Mask],
        weights: Sequence[float] | None,
    ) -> None:
        self._rows = DocumentWork(masks, weights)
        spans = sorted((a - b, a) for a, b in pairwise(documents) if a < b)
        work = {
            length: self._rows.before(length, length) for length in {-size for size, _ in spans}
        }
        self._whole = [
            _Document(start, -size, work[-size], -size, work[-size] / -size)
            for size, start in spans
        ]
        self._shorter = [-one.length for one in self._whole]  # these two grow, to be searched
        self._sparser = [-one.density for one in self._whole]
        self._cut: list[_Document] = []
        self._ranks, self._rank = num_ranks, 0
        self._tokens, self._work = documents[-1], sum(one.work for one in self._whole)
        self._need_tokens, self._need_work = 0, 0.0  # of this rank and all before it
        self._own: list[tuple[int, int]] = []
        self._token_slack = int(TOKEN_SLACK * self._tokens / num_ranks)
        self._work_slack = WORK_SLACK * self._work / num_ranks
        long = self._tokens >= _LONG_SHARD * num_ranks
        self._align = ALIGN * (2 if self._rows.folded else 1) if long else 1
        self._known_fewest: _Front | None = None
        self._known_most: _Front | None = None

    @property
    def _fewest(self) -> _Front:
        if self._known_fewest is None:
            self._known_fewest = _Front(reversed(self._whole), self._enough())
        return self._known_fewest

    @property
    def _most(self) -> _Front:
        if self._known_most is None:
            self._known_most = _Front(self._whole, self._enough())
        return self._known_most

    def _enough(self) -> int:
        """What this rank needs, and mostly the next ones."""
        return self._need_tokens * 9 // 8

    def next_rank(self) -> list[tuple[int, int]]:
        self._own = []
        before, self._rank = self._tokens * self._rank // self._ranks, self._rank + 1
        self._need_tokens += self._tokens * self._rank // self._ranks - before
        self._need_work += self._work / self._ranks
        if self._rank == self._ranks:
            for one in (*self._cut, *self._whole):
                self._take(one, one.tokens)
            return self._own
        if self._known_fewest and self._known_fewest.reach < self._need_tokens:
            self._known_fewest = None
        if self._known_most and self._known_most.reach < self._need_tokens:
            self._known_most = None
        for one in tuple(self._cut):
            if self._fits(one):
                self._take(one, one.tokens)
        self._take_whole()
        while self._take_share():
            pass
        return self._own

    def _is_met(self) -> bool:
        met = self._need_tokens <= self._token_slack
        return met and -self._work_slack <= self._need_work <= self._work_slack

    def _fits(self, one: _Document) -> bool:
        """Whether others can fill the rest, in tokens and in work, up to the slack."""
        tokens, work = self._need_tokens - one.tokens, self._need_work - one.work
        if tokens < -self._token_slack:
            return False
        rest, slack = max(tokens, 0), self._work_slack
        return self._fewest.work(rest) - slack <= work <= self._most.work(rest) + slack

    def _take_whole(self) -> None:
        first = True
        while not self._is_met() and not self._finish():
            tokens, work = self._need_tokens, self._need_work + self._work_slack
            low = bisect_left(self._shorter, -tokens - self._token_slack)
            high = len(self._whole)
            fewest = self._fewest
            while low < high:  # longer ones leave too little work for the tokens of the rest
                middle = (low + high) // 2
                one = self._whole[middle]
                if work - one.work < fewest.work(max(tokens - one.length, 0)):
                    low = middle + 1
                else:
                    high = middle
            if not first and tokens > 0:
                near = bisect_left(self._sparser, -self._need_work / tokens)
                low = max(low, min(near, len(self._whole) - 1))
            first = False
            if low == len(self._whole) or not self._fits(self._whole[low]):
                return
            self._take(self._whole[low], self._whole[low].tokens)

    def _finish(self) -> bool:
        """With two documents that together are what is needed, if there are such."""
        whole, tokens, work = self._whole, self._need_tokens, self._need_work
        if len(whole) < _ENOUGH or tokens > 2 * whole[len(whole) // 8].length:
            return False
        low = bisect_left(self._shorter, -tokens)
        high = bisect_right(self._shorter, -tokens / 2)  # the longer of the two is before
        while low < high:  # the longer the one, the more work both have
            middle = (low + high) // 2
            one = whole[middle]
            at = bisect_left(self._shorter, one.length - tokens)
            both = one.work + (whole[at].work if at < len(whole) else 0.0)
            if both > work:
                low = middle + 1
            else:
                high = middle
        for near in range(max(low - 2, 0), min(low + 3, len(whole))):
            one = whole[near]
            at = bisect_left(self._shorter, one.length - tokens)
            for other in whole[max(at - 1, 0) : at + 1]:
                rest, left = tokens - one.length - other.length, work - one.work - other.work
                if (
                    other is not one
                    and abs(rest) <= self._token_slack
                    and abs(left) <= self._work_slack
                ):
                    self._take(one, one.tokens)
                    self._take(other, other.tokens)
                    return True
        return False

    def _take_share(self) -> bool:
        """From a document denser than the rest that is needed and from a sparser one, such that
        both together are even; those already cut first. False: nothing is needed any more."""
        tokens, work = self._need_tokens, self._need_work
        if tokens <= self._align // 2 or self._is_met():
            return False
        needed = work / tokens
        at = bisect_right(self._sparser, -needed)
        denser = [one for one in self._cut if one.density >= needed] or self._whole[:at][-1:]
        sparser = [one for one in self._cut if one.density < needed] or self._whole[at : at + 1]
        if not denser or not sparser:
            ends = [*self._cut, *self._whole[:1], *self._whole[-1:]]
            one = max(ends, key=_density) if sparser else min(ends, key=_density)
            self._take(one, min(self._aligned(tokens), one.tokens))
            return True
        dense, sparse = min(denser, key=_density), max(sparser, key=_density)
        for one in (sparse, dense):
            if one.tokens < tokens:
                continue
            if abs(tokens * self._first_density(one, tokens) - work) <= self._work_slack:
                self._take(one, min(self._aligned(tokens), one.tokens))
                return True
        share = tokens * (needed - sparse.density) / (dense.density - sparse.density)
        if share > dense.tokens or tokens - share > sparse.tokens:  # it is not enough: all of it
            one = dense if share > dense.tokens else sparse
            self._take(one, one.tokens)
            return True
        some = min(self._aligned(share), dense.tokens, tokens)
        for _ in range(0 if self._rows.even else 2):  # they may be less dense than others
            high = self._first_density(dense, some)
            low = self._first_density(sparse, min(tokens - some, sparse.tokens))
            if high > low:
                share = tokens * (needed - low) / (high - low)
                some = max(min(self._aligned(share), dense.tokens, tokens), 0)
        self._take(dense, some)
        self._take(sparse, min(self._aligned(tokens - some), sparse.tokens))
        return True

    def _aligned(self, tokens: float) -> int:
        return round(tokens / self._align) * self._align

    def _spans(self, one: _Document, tokens: int) -> list[tuple[int, int]]:
        """The next tokens of a document, counted from its start."""
        length = one.length
        first, last = length - one.tokens, length - one.tokens + tokens
        if not self._rows.folded or tokens == length:
            return [(first, last)]
        # Tokens of even numbers count from the front, those of odd ones from the end.
        front = ((first + 1) // 2, (last + 1) // 2)
        return [front, (length - last // 2, length - first // 2)]

    def _first_density(self, one: _Document, tokens: int) -> float:
        """Of the next tokens; of few ones, and where that is the same, of all."""
        if self._rows.even or tokens <= self._align:
            return one.density
        return self._rows.of(self._spans(one, tokens), one.length) / tokens

    def _take(self, one: _Document, tokens: int) -> None:
        if tokens == 0:
            return
        spans = self._spans(one, tokens)
        work = one.work if tokens == one.tokens else self._rows.of(spans, one.length)
        length = one.length
        first, last = length - one.tokens, length - one.tokens + tokens
        self._own += [(one.start + a, one.start + b) for a, b in spans]
        self._need_tokens -= tokens
        self._need_work -= work
        if first == 0:
            self._whole_is_gone(one)
            if last < length:
                self._cut.append(one)
        elif last == length:
            self._cut.remove(one)
        if last < length:
            one.tokens, one.work = length - last, one.work - work
            one.density = one.work / one.tokens

    def _whole_is_gone(self, one: _Document) -> None:
        at = self._whole.index(one)
        for column in (self._whole, self._shorter, self._sparser):
            del column[at]
        most, fewest = self._known_most, self._known_fewest
        if most and at < most.size:
            self._known_most = None
        if fewest and at > len(self._whole) - fewest.size:
            self._known_fewest = None
