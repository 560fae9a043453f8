"""The slow truth: masks, runs and kernel calls as dense matrices of single pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.mask import Mask, RowRanges
from mesh_attention.plan.program import Call, CallKind
from mesh_attention.plan.runs import Run

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


def dense_mask(mask: Mask, q_tokens: int, kv_tokens: int) -> Pairs:
    pairs = np.zeros((q_tokens, kv_tokens), dtype=np.bool_)
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


def pairs_of_calls(
    calls: tuple[Call, ...], q: Positions, k: Positions, rows: RowRanges
) -> NDArray[np.int64]:
    """How often the calls compute each (query row, key row), for rows at these positions."""
    computed = np.zeros((len(q), len(k)), dtype=np.int64)
    lo, hi = rows.bounds(q)
    visible = (k[None, :] >= lo[:, None]) & (k[None, :] < hi[:, None])
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
