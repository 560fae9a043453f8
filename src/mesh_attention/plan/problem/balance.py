"""Share out a pack of documents so that tokens and work are even and most documents stay whole.

`choose/documents.py` asks for it; plain numbers in and out, no layout and no plan.

Two facts make it exact. A share f of a causal document, taken as a pair of stretches from its
front and from its end, {[a, b), [L-b, L-a)}, holds f of its tokens and f of its work. And what is
left after each rank always has the mean density (work per token): there are always denser and
sparser tokens than a rank still needs, and a share of each makes it even.

Ranks are filled one after the other with whole documents: first the longest whose remainder others
can fill, then documents as dense as that remainder, at last two that make it even. Where no whole
documents fit within the slack, shares of two documents do. Targets are cumulative: what one rank
lacks, the next one gets, so differences do not add up. Shards of equally many tokens have no
padding, which some kernels do not take: there the last tokens come from short documents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
_STEPS = 32  # many equal documents are taken at once, up to such a part of what is needed
_ENOUGH = 4  # of documents of fewer lengths no two are likely to make a rank even


def balanced_stretches(
    documents: Sequence[int],
    num_ranks: int,
    masks: Sequence[Mask],
    weights: Sequence[float] | None = None,
    *,
    exact: bool = False,
) -> Stretches:
    """The positions of each rank, for documents given by their cumulative starts. `masks` are those
    of the layers inside a document; `weights`, how much a pair of each costs. `exact`: all ranks
    have equally many tokens, for which more documents are cut.

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
    if exact and documents[-1] % num_ranks:
        raise PlanError(f"{documents[-1]} tokens: {num_ranks} ranks cannot have equally many")
    left = _Left(documents, num_ranks, masks, weights, exact)
    return tuple(joined(sorted(left.next_rank())) for _ in range(num_ranks))


@dataclass(slots=True, eq=False)
class _Kind:
    """Documents of one length, which are taken from the end of `starts`: whole ones, or a single
    one of which only the last tokens are left. Where late rows have more to do tokens are numbered
    from both ends: first, last, second, last but one. `work`, `tokens`: what is left of each."""

    starts: list[int]
    length: int
    work: float
    tokens: int
    density: float


def _density(kind: _Kind) -> float:
    return kind.density


def _length(kind: _Kind) -> int:
    return kind.length


# Negative, so that they grow and can be searched.
def _shorter(kind: _Kind) -> int:
    return -kind.length


def _sparser(kind: _Kind) -> float:
    return -kind.density


class _Front:
    """The work of the first tokens of whole documents in some order, as far as it was asked for.
    All documents of one length are one step: there are few lengths, however many documents."""

    def __init__(self, kinds: list[_Kind], *, backwards: bool) -> None:
        self._kinds, self._backwards = kinds, backwards
        self._tokens, self._works = [0], [0.0]  # before each kind

    def forget(self, at: int) -> None:
        """What follows a kind, of which one is about to go."""
        place = len(self._kinds) - 1 - at if self._backwards else at
        del self._tokens[place + 1 :], self._works[place + 1 :]

    def work(self, tokens: int) -> float:
        while self._tokens[-1] < tokens and len(self._tokens) <= len(self._kinds):
            kind = self._kind(len(self._tokens) - 1)
            self._tokens.append(self._tokens[-1] + len(kind.starts) * kind.length)
            self._works.append(self._works[-1] + len(kind.starts) * kind.work)
        at = bisect_right(self._tokens, tokens) - 1
        if at == len(self._kinds):
            return self._works[at]
        kind = self._kind(at)
        whole, some = divmod(tokens - self._tokens[at], kind.length)
        return self._works[at] + whole * kind.work + some * kind.density

    def _kind(self, place: int) -> _Kind:
        return self._kinds[-1 - place if self._backwards else place]


class _Left:
    """What no rank has yet: whole documents, longest and so densest first, and cut ones."""

    def __init__(
        self,
        documents: Sequence[int],
        num_ranks: int,
        masks: Sequence[Mask],
        weights: Sequence[float] | None,
        exact: bool,
    ) -> None:
        self._exact = exact
        self._rows = DocumentWork(masks, weights)
        starts: defaultdict[int, list[int]] = defaultdict(list)  # by length, the last ones first
        for stop, start in pairwise(reversed(documents)):
            if start < stop:
                starts[stop - start].append(start)
        self._whole: list[_Kind] = []
        for n in sorted(starts, reverse=True):
            work = self._rows.before(n, n)
            self._whole.append(_Kind(starts[n], n, work, n, work / n))
        self._most = _Front(self._whole, backwards=False)
        self._fewest = _Front(self._whole, backwards=True)
        self._cut: list[_Kind] = []
        self._ranks, self._rank = num_ranks, 0
        self._tokens = documents[-1]
        self._work = sum(len(kind.starts) * kind.work for kind in self._whole)
        self._need_tokens, self._need_work = 0, 0.0  # of this rank and all before it
        self._own: list[tuple[int, int]] = []
        self._token_slack = int(TOKEN_SLACK * self._tokens / num_ranks)
        self._token_excess = 0 if exact else self._token_slack  # that a rank may have too many
        self._work_slack = WORK_SLACK * self._work / num_ranks
        long = self._tokens >= _LONG_SHARD * num_ranks
        self._align = ALIGN * (2 if self._rows.folded else 1) if long else 1

    def next_rank(self) -> list[tuple[int, int]]:
        """The positions of the next rank, in any order; the last rank takes all that is left."""
        self._own = []
        before, self._rank = self._tokens * self._rank // self._ranks, self._rank + 1
        self._need_tokens += self._tokens * self._rank // self._ranks - before
        self._need_work += self._work / self._ranks
        if self._rank == self._ranks:
            for kind in (*self._cut, *self._whole):
                while kind.starts:
                    self._take(kind)
            return self._own
        for cut in tuple(self._cut):
            if self._fits(cut):
                self._take(cut)
        self._take_whole()
        while self._take_share():
            pass
        while self._exact and self._need_tokens > 0:
            # Of a short document few rows travel.
            shortest = min((*self._cut, *self._whole[-1:]), key=_length)
            self._take(shortest, self._need_tokens, aligned=False)
        return self._own

    def _is_met(self) -> bool:
        met = self._need_tokens <= self._token_slack
        return met and -self._work_slack <= self._need_work <= self._work_slack

    def _fits(self, kind: _Kind, count: int = 1) -> bool:
        """Whether others can fill the rest, in tokens and in work, up to the slack."""
        tokens = self._need_tokens - count * kind.tokens
        work = self._need_work - count * kind.work
        if tokens < -self._token_excess:
            return False
        rest, slack = max(tokens, 0), self._work_slack
        return self._fewest.work(rest) - slack <= work <= self._most.work(rest) + slack

    def _take_whole(self) -> None:
        """Take whole documents as long as the others can fill the rest."""
        whole, first = self._whole, True
        while not self._is_met() and not self._finish():
            tokens, work = self._need_tokens, self._need_work + self._work_slack
            fitting = bisect_left(whole, -tokens - self._token_excess, key=_shorter)

            def leaves_enough(kind: _Kind, tokens: int = tokens, work: float = work) -> bool:
                """Longer documents leave too little work for the tokens of the rest."""
                return work - kind.work >= self._fewest.work(max(tokens - kind.length, 0))

            at = bisect_left(whole, True, lo=fitting, key=leaves_enough)
            if at == len(whole):
                return
            if not first and tokens > 0:
                near = bisect_left(whole, -self._need_work / tokens, key=_sparser)
                at = max(at, min(near, len(whole) - 1))
            first, kind = False, whole[at]
            if not self._fits(kind):
                return
            several = min(len(kind.starts), tokens // (_STEPS * kind.length))
            for _ in range(several if several > 1 and self._fits(kind, several) else 1):
                self._take(kind)

    def _finish(self) -> bool:
        """Take two documents that together are what is needed; False where there are none."""
        whole, tokens, work = self._whole, self._need_tokens, self._need_work
        if len(whole) < _ENOUGH or tokens > 2 * whole[len(whole) // 8].length:
            return False
        low = bisect_left(whole, -tokens, key=_shorter)
        high = bisect_right(whole, -tokens / 2, key=_shorter)  # the longer of the two is before

        def partner(kind: _Kind) -> int:
            return bisect_left(whole, kind.length - tokens, key=_shorter)

        def is_little(kind: _Kind) -> bool:
            """The longer the document, the more work it and its partner have."""
            at = partner(kind)
            return kind.work + (whole[at].work if at < len(whole) else 0.0) <= work

        low = bisect_left(whole, True, lo=low, hi=high, key=is_little) if low < high else low
        for kind in whole[max(low - 2, 0) : low + 3]:
            at = partner(kind)
            for other in whole[max(at - 1, 0) : at + 1]:
                left = tokens - kind.length - other.length
                if (
                    (other is not kind or len(kind.starts) > 1)
                    and -self._token_excess <= left <= self._token_slack
                    and abs(work - kind.work - other.work) <= self._work_slack
                ):
                    self._take(kind)
                    self._take(other)
                    return True
        return False

    def _take_share(self) -> bool:
        """Take shares of a document denser than what is needed and of a sparser one, so that both
        together are even; cut documents come first. False where nothing is needed any more."""
        tokens, work = self._need_tokens, self._need_work
        if self._aligned(tokens) == 0 or self._is_met():
            return False
        needed = work / tokens
        at = bisect_right(self._whole, -needed, key=_sparser)
        denser = [cut for cut in self._cut if cut.density >= needed] or self._whole[:at][-1:]
        sparser = [cut for cut in self._cut if cut.density < needed] or self._whole[at : at + 1]
        if not denser or not sparser:
            ends = [*self._cut, *self._whole[:1], *self._whole[-1:]]
            self._take(max(ends, key=_density) if sparser else min(ends, key=_density), tokens)
            return True
        dense, sparse = min(denser, key=_density), max(sparser, key=_density)
        for kind in (sparse, dense):
            if (
                kind.tokens >= tokens
                and abs(tokens * self._first_density(kind, tokens) - work) <= self._work_slack
            ):
                self._take(kind, tokens)
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
        count = tokens / self._align
        return self._align * (int(count) if self._exact else round(count))

    def _spans(self, kind: _Kind, tokens: int) -> list[tuple[int, int]]:
        """The next tokens of a document, counted from its start."""
        length = kind.length
        first, last = length - kind.tokens, length - kind.tokens + tokens
        if not self._rows.folded or tokens == length:
            return [(first, last)]
        # Tokens of even numbers count from the front, those of odd ones from the end.
        front = ((first + 1) // 2, (last + 1) // 2)
        return [front, (length - last // 2, length - first // 2)]

    def _first_density(self, kind: _Kind, tokens: int) -> float:
        """The density of the next tokens, or of the whole document where that is the same or the
        tokens are few."""
        if self._rows.even or tokens <= self._align:
            return kind.density
        return self._rows.of(self._spans(kind, tokens), kind.length) / tokens

    def _take(self, kind: _Kind, tokens: int | None = None, *, aligned: bool = True) -> None:
        """Give this rank so many tokens of the next document of a kind, or all that is left."""
        left = kind.tokens
        tokens = left if tokens is None else min(self._aligned(tokens) if aligned else tokens, left)
        if tokens == 0:
            return
        spans, length = self._spans(kind, tokens), kind.length
        work = kind.work if tokens == left else self._rows.of(spans, length)
        self._need_tokens -= tokens
        self._need_work -= work
        if left == length:
            at = bisect_left(self._whole, -length, key=_shorter)
            self._most.forget(at)
            self._fewest.forget(at)
        start = kind.starts.pop()
        self._own += [(start + a, start + b) for a, b in spans]
        if not kind.starts:
            (self._whole if left == length else self._cut).remove(kind)
        if tokens < left:
            rest, more = left - tokens, kind.work - work
            self._cut.append(_Kind([start], length, more, rest, more / rest))
