"""Which keys a query may see, as piecewise-affine row ranges (algorithm.md, section 7).

Every mask here gives a query one interval of key positions, `lo(q) <= k < hi(q)`. Full, causal,
sliding-window, packed-document and prefix-LM masks are one family: in each document the bounds
are the largest (smallest) of a few lines of slope 0 or 1. `Mask.segments` cuts the queries into
stretches on which each bound is a single line, so everything downstream works on intervals and
never on single tokens.

Both bounds never fall as `q` grows; `RowRanges` relies on it to bound a whole interval of queries
by its two ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import PlanError
from mesh_attention.plan.arguments import flag, number

Line = tuple[int, int]  # (base, slope): the value at q is base + slope * q
Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries `start <= q < stop` see keys `lo + lo_slope*q <= k < hi + hi_slope*q`."""

    start: int
    stop: int
    lo: int
    lo_slope: int
    hi: int
    hi_slope: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask without its sizes; `Problem` checks that it fits the token counts.

    causal         a query sees keys up to its own position (aligned at the end of the document
                   when queries and keys differ in number, as flash-attn does)
    window         (left, right) keys around the query's own position; None = unlimited that side
    prefix         with causal: the first `prefix` keys of each document are seen by all its queries
    documents      cumulative starts (0, ..., q_tokens) of packed documents; None = one document
    kv_documents   the same for keys; None = as `documents`
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    prefix: int = 0
    documents: tuple[int, ...] | None = None
    kv_documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        flag("causal", self.causal)
        object.__setattr__(self, "prefix", number("prefix", self.prefix, least=None))
        if self.window is not None:
            object.__setattr__(self, "window", _window(self.window))
        for name in ("documents", "kv_documents"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _cuts(name, getattr(self, name)))
        if self.prefix < 0 or (self.prefix and not self.causal):
            raise PlanError(
                f"prefix={self.prefix} needs causal=True and a length >= 0: "
                "without a causal mask every key is visible already"
            )
        if self.prefix and self.window:
            raise PlanError("'prefix' and 'window' exclude each other; choose one")
        for side in self.window or ():
            if side is not None and side < 0:
                raise PlanError(
                    f"window={self.window}: a side is a number >= 0, or None for no limit"
                )
        if self.kv_documents is not None and self.documents is None:
            raise PlanError("kv_documents needs 'documents' (the boundaries of the queries)")
        for name, cuts in (("documents", self.documents), ("kv_documents", self.kv_documents)):
            if cuts is not None and (
                len(cuts) < 2 or cuts[0] != 0 or any(b < a for a, b in pairwise(cuts))
            ):
                raise PlanError(f"{name}={cuts}: give cumulative starts (0, ..., number of tokens)")
        if self.kv_documents and self.documents and len(self.kv_documents) != len(self.documents):
            raise PlanError("'documents' and kv_documents must have the same number of documents")

    @property
    def is_full(self) -> bool:
        return not self.causal and self.window is None and self.documents is None

    def describe(self) -> str:
        parts = ["causal" if self.causal else "full"]
        if self.window:
            left, right = ("inf" if s is None else str(s) for s in self.window)
            parts.append(f"window {left}:{right}")
        if self.prefix:
            parts.append(f"prefix {self.prefix}")
        if self.documents:
            parts.append(f"{len(self.documents) - 1} documents")
        return ", ".join(parts)

    def rows(self, q_tokens: int, kv_tokens: int) -> RowRanges:
        """The mask on real sizes."""
        return _row_ranges(self, q_tokens, kv_tokens)

    def _document_lines(
        self, q: tuple[int, int], k: tuple[int, int]
    ) -> tuple[list[Line], list[Line], list[Line]]:
        """Lines of one document: lo is the largest of the first list; hi is the smallest of the
        second, or the largest of the third where that is larger (the prefix)."""
        own = k[1] - q[1]  # the key position that lies under query position 0
        lows: list[Line] = [(k[0], 0)]
        highs: list[Line] = [(k[1], 0)]
        left, right = self.window or (None, None)
        if left is not None:
            lows.append((own - left, 1))
        if right is not None:
            highs.append((own + right + 1, 1))
        if self.causal:
            highs.append((own + 1, 1))
        floor = [(min(k[0] + self.prefix, k[1]), 0)] if self.prefix else []
        return lows, highs, floor


class RowRanges:
    """A mask on real token counts: segments, and vectorised bounds `lo(q)` and `hi(q)`."""

    __slots__ = ("_lines", "_starts", "kv_tokens", "q_tokens", "segments")

    def __init__(self, segments: tuple[Segment, ...], q_tokens: int, kv_tokens: int) -> None:
        self.segments = segments
        self.q_tokens = q_tokens
        self.kv_tokens = kv_tokens
        self._starts = np.array([s.start for s in segments], dtype=np.int64)
        lines = [(s.lo, s.lo_slope, s.hi, s.hi_slope) for s in segments]
        self._lines = tuple(np.array(lines, dtype=np.int64).reshape(-1, 4).T.copy())

    def bounds(self, q: Array) -> tuple[Array, Array]:
        """`lo` and `hi` of each query position; positions past the end (padding) see nothing."""
        if not self.segments:
            return np.zeros_like(q), np.zeros_like(q)
        at: Array | int = 0
        if len(self.segments) > 1:
            at = np.maximum(np.searchsorted(self._starts, q, side="right") - 1, 0)
        lo, lo_slope, hi, hi_slope = self.lines(at)
        real = q < self.q_tokens
        return np.where(real, lo + lo_slope * q, 0), np.where(real, hi + hi_slope * q, 0)

    def segment_at(self, q: int) -> Segment:
        return self.segments[int(np.searchsorted(self._starts, q, side="right")) - 1]

    def segments_between(self, start: int, stop: int) -> range:
        """Indices of the segments that may hold queries of `start..stop`."""
        first = max(int(np.searchsorted(self._starts, start, side="right")) - 1, 0)
        return range(first, int(np.searchsorted(self._starts, stop, side="left")))

    def lines(self, at: Array | int) -> tuple[Array, ...]:
        """lo, its slope, hi and its slope of these segments."""
        return tuple(line[at] for line in self._lines)


def _window(window: Any) -> tuple[int | None, int | None]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise PlanError(f"window={window!r}: give (left, right), None for no limit") from None
    return (
        None if left is None else number("window", left, least=None),
        None if right is None else number("window", right, least=None),
    )


def _cuts(name: str, cuts: Any) -> tuple[int, ...]:
    if not hasattr(cuts, "__iter__") or isinstance(cuts, str | bytes):
        raise PlanError(f"{name}={cuts!r}: give cumulative starts (0, ..., number of tokens)")
    return tuple(number(name, cut, least=0) for cut in cuts)


@lru_cache(maxsize=64)
def _row_ranges(mask: Mask, q_tokens: int, kv_tokens: int) -> RowRanges:
    q_cuts = mask.documents or (0, q_tokens)
    k_cuts = mask.kv_documents or mask.documents or (0, kv_tokens)
    segments: list[Segment] = []
    for q, k in zip(pairwise(q_cuts), pairwise(k_cuts), strict=True):
        if q[0] < q[1]:
            segments += _document_segments(q, k, *mask._document_lines(q, k))
    return RowRanges(tuple(_joined(segments)), q_tokens, kv_tokens)


def _document_segments(
    q: tuple[int, int], k: tuple[int, int], lows: list[Line], highs: list[Line], floor: list[Line]
) -> list[Segment]:
    lines = lows + highs + floor + [(k[0], 0), (k[1], 0)]
    flat = {base for base, slope in lines if slope == 0}
    steep = {base for base, slope in lines if slope == 1}
    # Two lines can only swap places where a flat one meets a steep one: c = base + q.
    cuts = sorted({q[0], q[1]} | {c - s for c in flat for s in steep if q[0] < c - s < q[1]})
    segments = []
    for start, stop in pairwise(cuts):

        def key(line: Line, start: int = start, stop: int = stop) -> tuple[int, int]:
            return (line[0] + line[1] * start, line[0] + line[1] * (stop - 1))

        lo = max(lows, key=key)
        hi = min(highs, key=key)
        if floor:
            hi = max([hi, *floor], key=key)
        # Rows that see nothing keep an empty interval inside the document, so bounds never fall.
        if key(hi)[0] <= key(lo)[0] and key(hi)[1] <= key(lo)[1]:
            edge = (k[0], 0) if key(hi)[1] <= k[0] else (k[1], 0)
            lo = hi = edge
        segments.append(Segment(start, stop, *lo, *hi))
    return segments


def _joined(segments: list[Segment]) -> list[Segment]:
    """Neighbours made one where the earlier one's lines hold for both."""
    joined: list[Segment] = []
    for s in segments:
        last = joined[-1] if joined else None
        if last and _ends(last, s) == _ends(s, s):
            joined[-1] = Segment(last.start, s.stop, last.lo, last.lo_slope, last.hi, last.hi_slope)
        else:
            joined.append(s)
    return joined


def _ends(lines: Segment, on: Segment) -> tuple[int, ...]:
    """The bounds of one segment at the first and the last query of another."""
    return tuple(
        base + slope * q
        for base, slope in ((lines.lo, lines.lo_slope), (lines.hi, lines.hi_slope))
        for q in (on.start, on.stop - 1)
    )
