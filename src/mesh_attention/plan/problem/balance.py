"""Share out a pack of documents so that tokens and work are even and most documents stay whole.

`choose/documents.py` asks for it; plain numbers in and out, no layout and no plan.

Two facts make it exact. A share f of a causal document, taken as a pair of stretches from its
front and from its end, {[a, b), [L-b, L-a)}, holds f of its tokens and f of its work. And what is
left after each rank always has the mean density (work per token): there are always denser and
sparser tokens than a rank still needs, and a share of each makes it even.

Ranks are filled one after the other with whole documents: first the longest whose remainder others
can fill, then documents as dense as that remainder, at last two that make it even. Where no whole
documents fit within the slack, shares of two documents do. Targets are cumulative: what one rank
lacks, the next one gets, so differences do not add up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        for document in documents:
            tokens += document.length
            work += document.work
            self._tokens.append(tokens)
            self._works.append(work)
            self._densities.append(document.density)
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
        spans = sorted((start - stop, start) for start, stop in pairwise(documents) if start < stop)
        lengths = {-size for size, _ in spans}
        work = {length: self._rows.before(length, length) for length in lengths}
        self._whole = [
            _Document(start, -size, work[-size], -size, work[-size] / -size)
            for size, start in spans
        ]
        # Negative, so that both columns grow and can be searched.
        self._shorter = [-document.length for document in self._whole]
        self._sparser = [-document.density for document in self._whole]
        self._cut: list[_Document] = []
        self._ranks, self._rank = num_ranks, 0
        self._tokens, self._work = documents[-1], sum(document.work for document in self._whole)
        self._need_tokens, self._need_work = 0, 0.0  # of this rank and all before it
        self._own: list[tuple[int, int]] = []
        self._token_slack = int(TOKEN_SLACK * self._tokens / num_ranks)
        self._work_slack = WORK_SLACK * self._work / num_ranks
        long = self._tokens >= _LONG_SHARD * num_ranks
        self._align = ALIGN * (2 if self._rows.folded else 1) if long else 1

    # Both know a little more than this rank needs, and so mostly what the next ones need.
    @cached_property
    def _fewest(self) -> _Front:
        return _Front(reversed(self._whole), self._need_tokens * 9 // 8)

    @cached_property
    def _most(self) -> _Front:
        return _Front(self._whole, self._need_tokens * 9 // 8)

    def _known(self, front: str) -> _Front | None:
        made: _Front | None = self.__dict__.get(front)
        return made

    def next_rank(self) -> list[tuple[int, int]]:
        self._own = []
        before, self._rank = self._tokens * self._rank // self._ranks, self._rank + 1
        self._need_tokens += self._tokens * self._rank // self._ranks - before
        self._need_work += self._work / self._ranks
        if self._rank == self._ranks:
            for document in (*self._cut, *self._whole):
                self._take(document)
            return self._own
        for name in ("_fewest", "_most"):
            if (front := self._known(name)) and front.reach < self._need_tokens:
                delattr(self, name)
        for document in tuple(self._cut):
            if self._fits(document):
                self._take(document)
        self._take_whole()
        while self._take_share():
            pass
        return self._own

    def _is_met(self) -> bool:
        met = self._need_tokens <= self._token_slack
        return met and -self._work_slack <= self._need_work <= self._work_slack

    def _fits(self, document: _Document) -> bool:
        """Whether others can fill the rest, in tokens and in work, up to the slack."""
        tokens, work = self._need_tokens - document.tokens, self._need_work - document.work
        if tokens < -self._token_slack:
            return False
        rest, slack = max(tokens, 0), self._work_slack
        return self._fewest.work(rest) - slack <= work <= self._most.work(rest) + slack

    def _take_whole(self) -> None:
        """Take whole documents as long as the others can fill the rest."""
        first = True
        while not self._is_met() and not self._finish():
            tokens, work = self._need_tokens, self._need_work + self._work_slack
            low = bisect_left(self._shorter, -tokens - self._token_slack)

            def leaves_enough(
                document: _Document,
                fewest: _Front = self._fewest,
                tokens: int = tokens,
                work: float = work,
            ) -> bool:
                """Longer documents leave too little work for the tokens of the rest."""
                return work - document.work >= fewest.work(max(tokens - document.length, 0))

            low = bisect_left(self._whole, True, lo=low, key=leaves_enough)
            if not first and tokens > 0:
                near = bisect_left(self._sparser, -self._need_work / tokens)
                low = max(low, min(near, len(self._whole) - 1))
            first = False
            if low == len(self._whole) or not self._fits(self._whole[low]):
                return
            self._take(self._whole[low])

    def _finish(self) -> bool:
        """Take two documents that together are what is needed; False where there are none."""
        whole, tokens, work = self._whole, self._need_tokens, self._need_work
        if len(whole) < _ENOUGH or tokens > 2 * whole[len(whole) // 8].length:
            return False
        low = bisect_left(self._shorter, -tokens)
        high = bisect_right(self._shorter, -tokens / 2)  # the longer of the two is before

        def partner(document: _Document) -> int:
            return bisect_left(self._shorter, document.length - tokens)

        def is_little(document: _Document) -> bool:
            """The longer the document, the more work it and its partner have."""
            at = partner(document)
            return document.work + (whole[at].work if at < len(whole) else 0.0) <= work

        low = bisect_left(whole, True, lo=low, hi=high, key=is_little) if low < high else low
        for document in whole[max(low - 2, 0) : low + 3]:
            at = partner(document)
            for other in whole[max(at - 1, 0) : at + 1]:
                if (
                    other is not document
                    and abs(tokens - document.length - other.length) <= self._token_slack
                    and abs(work - document.work - other.work) <= self._work_slack
                ):
                    self._take(document)
                    self._take(other)
                    return True
        return False

    def _take_share(self) -> bool:
        """Take shares of a document denser than what is needed and of a sparser one, so that both
        together are even; cut documents come first. False where nothing is needed any more."""
        tokens, work = self._need_tokens, self._need_work
        if tokens <= self._align // 2 or self._is_met():
            return False
        needed = work / tokens
        at = bisect_right(self._sparser, -needed)
        denser = [cut for cut in self._cut if cut.density >= needed] or self._whole[:at][-1:]
        sparser = [cut for cut in self._cut if cut.density < needed] or self._whole[at : at + 1]
        if not denser or not sparser:
            ends = [*self._cut, *self._whole[:1], *self._whole[-1:]]
            self._take(max(ends, key=_density) if sparser else min(ends, key=_density), tokens)
            return True
        dense, sparse = min(denser, key=_density), max(sparser, key=_density)
        for document in (sparse, dense):
            if (
                document.tokens >= tokens
                and abs(tokens * self._first_density(document, tokens) - work) <= self._work_slack
            ):
                self._take(document, tokens)
                return True
        share = tokens * (needed - sparse.density) / (dense.density - sparse.density)
        if share > dense.tokens or tokens - share > sparse.tokens:  # too short: all of it
            self._take(dense if share > dense.tokens else sparse)
            return True
        some = min(self._aligned(share), dense.tokens, tokens)
        for _ in range(0 if self._rows.even else 2):  # they may be less dense than others
            high = self._first_density(dense, some)
            low = self._first_density(sparse, min(tokens - some, sparse.tokens))
            if high > low:
                share = tokens * (needed - low) / (high - low)
                some = max(min(self._aligned(share), dense.tokens, tokens), 0)
        self._take(dense, some, aligned=False)
        self._take(sparse, tokens - some)
        return True

    def _aligned(self, tokens: float) -> int:
        return round(tokens / self._align) * self._align

    def _spans(self, document: _Document, tokens: int) -> list[tuple[int, int]]:
        """The next tokens of a document, counted from its start."""
        length = document.length
        first, last = length - document.tokens, length - document.tokens + tokens
        if not self._rows.folded or tokens == length:
            return [(first, last)]
        # Tokens of even numbers count from the front, those of odd ones from the end.
        front = ((first + 1) // 2, (last + 1) // 2)
        return [front, (length - last // 2, length - first // 2)]

    def _first_density(self, document: _Document, tokens: int) -> float:
        """The density of the next tokens, or of the whole document where that is the same or the
        tokens are few."""
        if self._rows.even or tokens <= self._align:
            return document.density
        return self._rows.of(self._spans(document, tokens), document.length) / tokens

    def _take(
        self, document: _Document, tokens: int | None = None, *, aligned: bool = True
    ) -> None:
        """Give this rank so many tokens of a document, or all that is left of it."""
        left = document.tokens
        tokens = left if tokens is None else min(self._aligned(tokens) if aligned else tokens, left)
        if tokens == 0:
            return
        spans, length = self._spans(document, tokens), document.length
        work = document.work if tokens == left else self._rows.of(spans, length)
        first, last = length - left, length - left + tokens
        self._own += [(document.start + a, document.start + b) for a, b in spans]
        self._need_tokens -= tokens
        self._need_work -= work
        if first == 0:
            self._whole_is_gone(document)
            if last < length:
                self._cut.append(document)
        elif last == length:
            self._cut.remove(document)
        if last < length:
            document.tokens, document.work = length - last, document.work - work
            document.density = document.work / document.tokens

    def _whole_is_gone(self, document: _Document) -> None:
        at = self._whole.index(document)
        for column in (self._whole, self._shorter, self._sparser):
            del column[at]
        most, fewest = self._known("_most"), self._known("_fewest")
        if most and at < most.size:
            del self._most
        if fewest and at > len(self._whole) - fewest.size:
            del self._fewest
