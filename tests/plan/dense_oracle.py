"""The slow truth: masks, runs and kernel calls as dense matrices of single pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.program import Call, CallKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import Run

Pairs = NDArray[np.bool_]
Positions = NDArray[np.int64]


def sees(mask: Mask, q: int, k: int, q_document: range, k_document: range) -> bool:
    """The definition, for a query and a key of one document."""
    own = q - q_document.stop + k_document.stop  # both documents end together
    if mask.prefix and k - k_document.start < mask.prefix:
        return True
    if mask.causal and k > own:
        return False
    left, right = mask.window or (None, None)
    if left is not None and k < own - left:
        return False
    return right is None or k <= own + right


def slice_sees(kind: str, q: int, k: int, q_left: int, k_left: int) -> bool:
    """The definition, for the q-th query and the k-th key of a slice, and how many are left."""
    return {
        "full": True,
        "causal": k_left >= q_left,
        "inverse_causal": k >= q,
        "bicausal": k_left >= q_left and k >= q,
    }[kind]


def dense_mask(mask: Mask, q_tokens: int, kv_tokens: int) -> Pairs:
    pairs = np.zeros((q_tokens, kv_tokens), dtype=np.bool_)
    if mask.slices is not None:
        for (q0, q1), (k0, k1), kind in mask.slices:
            for q in range(q0, q1):
                for k in range(k0, k1):
                    pairs[q, k] |= slice_sees(kind, q - q0, k - k0, q1 - q, k1 - k)
        return pairs
    q_cuts = mask.documents or (0, q_tokens)
    k_cuts = mask.kv_documents or mask.documents or (0, kv_tokens)
    for (q0, q1), (k0, k1) in zip(pairwise(q_cuts), pairwise(k_cuts), strict=True):
        for q in range(q0, q1):
            for k in range(k0, k1):
                pairs[q, k] = sees(mask, q, k, range(q0, q1), range(k0, k1))
    return pairs


def padded_to(pairs: Pairs, q_tokens: int, kv_tokens: int) -> Pairs:
    """The same with padding rows and columns, which see and show nothing."""
    q_more, k_more = q_tokens - pairs.shape[0], kv_tokens - pairs.shape[1]
    return np.pad(pairs, ((0, q_more), (0, k_more)))


def positions_of(runs: list[Run]) -> list[int]:
    return [x for run in runs for start, stop in run.blocks() for x in range(start, stop)]


def visible_pairs_of(rows: RowRanges, q: Positions, k: Positions) -> Pairs:
    """What row ranges show, pair by pair."""
    lo, hi = rows.intervals(q)
    shown: Pairs = np.logical_or.reduce((k >= lo[..., None]) & (k < hi[..., None]), axis=0)
    return shown


def pairs_of_calls(
    calls: tuple[Call, ...], q: Positions, k: Positions, rows: RowRanges
) -> NDArray[np.int64]:
    """How often the calls compute each (query row, key row), for rows at these positions."""
    computed = np.zeros((len(q), len(k)), dtype=np.int64)
    visible = visible_pairs_of(rows, q, k)
    for call in calls:
        where = (slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop))
        shape = computed[where].shape
        match call.kind:
            case CallKind.FULL:
                computed[where] += 1
            case CallKind.CAUSAL:
                assert shape[0] == shape[1]
                computed[where] += np.tri(shape[0], dtype=np.int64)
            case CallKind.RANGE:
                computed[where] += visible[where]
    return computed
