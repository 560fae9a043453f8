"""Which keys a query may see, as people say it (algorithm.md, section 7).

Full, causal, sliding-window, packed-document and prefix-LM masks are one family: a query sees one
interval of key positions, and in each document the bounds are the largest (smallest) of a few lines
of slope 0 or 1, so that both never fall as `q` grows. All other masks are unions of slices
(`mask_slices.py`). Either becomes `RowRanges` on real token counts, and planning reads only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from mesh_attention.errors import PlanError
from mesh_attention.plan.problem.arguments import flag, number
from mesh_attention.plan.problem.mask_slices import (
    Slice,
    SliceKind,
    checked_slices,
    crossings,
    frame_slices,
    segments_of,
    slices_of,
    tree_slices,
)
from mesh_attention.plan.problem.row_ranges import Interval, RowRanges, Segment, joined

Line = tuple[int, int]  # (base, slope): the value at q is base + slope * q


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask without its sizes; `Problem` checks that it fits the token counts.

    causal         a query sees keys up to its own position (aligned at the end of the document
                   when queries and keys differ in number, as flash-attn does)
    window         (left, right) keys around the query's own position; None = unlimited that side
    prefix         with causal: the first `prefix` keys of each document are seen by all its queries
    documents      cumulative starts (0, ..., q_tokens) of packed documents; None = one document
    kv_documents   the same for keys; None = as `documents`
    slices         in place of all others: ((query start, stop), (key start, stop), kind) of each,
                   kind being "full", "causal", "inverse_causal" or "bicausal" (`SliceKind`); a
                   query sees what one of them shows

    `tree`, `with_global_tokens` and `block_causal` make slices.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    prefix: int = 0
    documents: tuple[int, ...] | None = None
    kv_documents: tuple[int, ...] | None = None
    slices: tuple[Slice, ...] | None = None

    def __post_init__(self) -> None:
        self._normalise()
        if self.slices is not None and replace(self, slices=None) != Mask():
            raise PlanError(
                "slices define the whole mask: leave causal, window, documents and prefix out"
            )
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

    def _normalise(self) -> None:
        object.__setattr__(self, "causal", flag("causal", self.causal))
        object.__setattr__(self, "prefix", number("prefix", self.prefix, least=None))
        if self.window is not None:
            object.__setattr__(self, "window", _window(self.window))
        for name in ("documents", "kv_documents"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _cuts(name, getattr(self, name)))
        if self.slices is not None:
            object.__setattr__(self, "slices", checked_slices(self.slices))

    @staticmethod
    def tree(parents: Sequence[int | None], lengths: Sequence[int]) -> Mask:
        """Nodes of a forest that lie one after another, as rollouts of one prompt are packed: each
        sees itself causally and all of its ancestors. A parent comes before its children; a root
        has the parent None (or -1).

        >>> Mask.tree([None, 0, 0], [4, 2, 3]).describe()  # a prompt and two continuations
        '4 slices'
        """
        sizes = [number("lengths", length, least=0) for length in lengths]
        above = [_parent(node, parent) for node, parent in enumerate(parents)]
        if len(above) != len(sizes):
            raise PlanError(f"{len(above)} parents and {len(sizes)} lengths: give one of each")
        return Mask(slices=tree_slices(above, sizes))  # type: ignore[arg-type]

    @staticmethod
    def with_global_tokens(
        num_tokens: int,
        num_global: int,
        window: tuple[int | None, int | None],
        *,
        causal: bool = True,
    ) -> Mask:
        """A window, and first tokens that all see and that see all; where causal, up to their own
        position (attention sinks of StreamingLLM), otherwise all of them (Longformer)."""
        tokens, first = number("num_tokens", num_tokens), number("num_global", num_global, least=0)
        if first > tokens:
            raise PlanError(f"num_global={first} is more than the {tokens} tokens")
        near = slices_of(Mask(causal=causal, window=window).rows(tokens, tokens))
        seeing: Slice = (0, first), (0, tokens), SliceKind.FULL
        if causal:
            seeing = (0, first), (0, first), SliceKind.CAUSAL
        seen: Slice = (first if causal else 0, tokens), (0, first), SliceKind.FULL
        return Mask(slices=(*near, seeing, seen))

    @staticmethod
    def block_causal(num_tokens: int, frame: int, *, frames_seen: int | None = None) -> Mask:
        """Frames of `frame` tokens, as of a video: each sees itself whole and those before it, or
        `frames_seen` in all, its own among them."""
        seen = None if frames_seen is None else number("frames_seen", frames_seen)
        sizes = number("num_tokens", num_tokens), number("frame", frame)
        return Mask(slices=frame_slices(*sizes, seen))  # type: ignore[arg-type]

    @property
    def is_full(self) -> bool:
        plain = not self.causal and self.window is None and self.documents is None
        return plain and self.slices is None

    def describe(self) -> str:
        if self.slices is not None:
            return "1 slice" if len(self.slices) == 1 else f"{len(self.slices)} slices"
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


def _parent(node: int, parent: Any) -> int | None:
    if parent is None or (above := number("parents", parent, least=-1)) == -1:
        return None
    if above >= node:
        raise PlanError(f"node {node} has the parent {above}: a parent comes before its children")
    return above


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
    if mask.slices is not None:
        return RowRanges(segments_of(mask.slices, q_tokens), q_tokens, kv_tokens)
    q_cuts = mask.documents or (0, q_tokens)
    k_cuts = mask.kv_documents or mask.documents or (0, kv_tokens)
    plain = mask.window is None and not mask.prefix
    segments: list[Segment] = []
    for q, k in zip(pairwise(q_cuts), pairwise(k_cuts), strict=True):
        size = q[1] - q[0]
        if plain and size and (not mask.causal or size <= k[1] - k[0]):
            # Packs of many documents come with every batch: they are a line each.
            hi = (k[1] - q[1] + 1, 1) if mask.causal and size > 1 else (k[1], 0)
            segments.append(Segment(*q, (Interval(k[0], 0, *hi),)))
        elif size:
            segments += _document_segments(mask, q, k)
    return RowRanges(joined(segments), q_tokens, kv_tokens)


def _document_segments(mask: Mask, q: tuple[int, int], k: tuple[int, int]) -> list[Segment]:
    """Of a document with these queries and keys. A query sees keys from the largest of `lows` to
    the smallest of `highs`, or to the end of the prefix where that is larger."""
    own = k[1] - q[1]  # the key position that lies under query position 0
    left, right = mask.window or (None, None)
    lows: list[Line] = [(k[0], 0)] + ([(own - left, 1)] if left is not None else [])
    ahead = (right, 0 if mask.causal else None)
    highs = [(k[1], 0), *((own + reach + 1, 1) for reach in ahead if reach is not None)]
    floor: list[Line] = [(min(k[0] + mask.prefix, k[1]), 0)] if mask.prefix else []
    segments = []
    for start, stop in pairwise(crossings(lows + highs + floor, *q)):

        def key(line: Line, start: int = start, stop: int = stop) -> tuple[int, int]:
            return (line[0] + line[1] * start, line[0] + line[1] * (stop - 1))

        lo, hi = max(lows, key=key), max([min(highs, key=key), *floor], key=key)
        # Rows that see nothing, which end before the first key, keep an empty interval there, so
        # that bounds never fall.
        if key(hi)[0] <= key(lo)[0] and key(hi)[1] <= key(lo)[1]:
            lo = hi = (k[0], 0)
        segments.append(Segment(start, stop, (Interval(*lo, *hi),)))
    return segments
