"""The documents of a batch, from what training code has: `cu_seqlens`, packed `position_ids`, or a
padding mask.

Padding becomes a document of its own: no real token sees it. What contradicts itself, or says
something that documents cannot, is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.choose.documents import Starts
from mesh_attention.choose.pack import Pack, document_starts
from mesh_attention.errors import MeshAttentionError

Rows = list[Starts]  # cumulative starts (0, ..., tokens) of the documents of each row


def rows_of_documents(
    shape: tuple[int, int],
    cu_seqlens: Any = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Rows:
    """Of a batch of (rows, tokens). Positions and mask are on the CPU, of that shape."""
    num_rows, num_tokens = shape
    real = None if attention_mask is None else attention_mask.bool()
    said = None
    if cu_seqlens is not None:
        said = _rows(*document_starts("cu_seqlens", cu_seqlens), shape)
    rows = said or [(0, num_tokens)] * num_rows
    if position_ids is not None:
        restarts = _restarts(position_ids, real)
        if said is None:
            _refuse_negative_and_jumps(position_ids, real)
            rows = restarts
        else:
            _refuse_restarts_inside(restarts, said)
    if attention_mask is None:
        return rows
    spans = _real_tokens(attention_mask)
    if said is not None:
        _refuse_documents_of_padding(said, spans)
    # Padding on either side is a document.
    return [
        tuple(sorted({0, first, stop, num_tokens, *(s for s in row if first <= s <= stop)}))
        for row, (first, stop) in zip(rows, spans, strict=True)
    ]


def rows_of_pack(pack: Pack, shape: tuple[int, int]) -> Rows:
    """The documents of a pack that was made elsewhere."""
    return _rows(pack.documents, pack.num_rows, shape)


def _rows(starts: Starts, num_rows: int, shape: tuple[int, int]) -> Rows:
    rows, tokens = shape
    per_row = starts[-1] // num_rows
    if per_row != tokens:
        raise MeshAttentionError(
            f"the documents have {per_row} tokens in a row, and the batch has {tokens}; give the "
            "whole batch, which is sharded here and only once"
        )
    if num_rows not in (1, rows):
        raise MeshAttentionError(
            f"the documents are those of {num_rows} rows, and the batch has {rows}"
        )
    if num_rows == 1:
        return [starts] * rows
    return [
        tuple(s - row * tokens for s in starts if row * tokens <= s <= (row + 1) * tokens)
        for row in range(rows)
    ]


def _restarts(positions: Tensor, real: Tensor | None) -> Rows:
    """A document begins where a token is at 0; the first token begins one in any case."""
    begins = positions == 0
    if real is not None:
        begins = begins & real
    return [tuple(sorted({0, *torch.nonzero(row).flatten().tolist(), len(row)})) for row in begins]


def _refuse_negative_and_jumps(positions: Tensor, real: Tensor | None) -> None:
    """Negative ones would come to 0 inside a document, which then began there."""
    real = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    negative = (positions < 0) & real
    if negative.any():
        row, at = torch.nonzero(negative)[0].tolist()
        raise MeshAttentionError(
            f"position_ids of row {row} are {positions[row, at].item()} at token {at}, and "
            "negative positions begin no document: count from 0"
        )
    jumps = (positions[:, 1:] != positions[:, :-1] + 1) & (positions[:, 1:] != 0)
    jumps &= real[:, 1:] & real[:, :-1]
    if jumps.any():
        row, at = torch.nonzero(jumps)[0].tolist()
        before, after = positions[row, at : at + 2].tolist()
        raise MeshAttentionError(
            f"position_ids of row {row} go from {before} to {after} at token {at + 1}, which is "
            "neither the next position nor the begin of a document: give whole batches, which are "
            "cut here, and with cu_seqlens positions may be anything"
        )


def _refuse_restarts_inside(restarts: Rows, said: Rows) -> None:
    for row, (begun, starts) in enumerate(zip(restarts, said, strict=True)):
        inside = sorted({*begun} - {*starts})
        if inside:
            raise MeshAttentionError(
                f"position_ids of row {row} restart at token {inside[0]}, where cu_seqlens begin "
                "no document; leave one of them out"
            )


def _real_tokens(attention_mask: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each row, which are all that its mask may say."""
    real = attention_mask.bool()
    if bool((attention_mask != real).any()):
        raise MeshAttentionError(
            "attention_mask holds other values than 0 and 1; give the documents of a pack as "
            "cu_seqlens or position_ids"
        )
    counts = real.sum(1).tolist()
    firsts = real.int().argmax(1).tolist()
    spans = []
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if not bool(real[row, first : first + count].all()):
            raise MeshAttentionError(
                f"attention_mask of row {row} has padding between tokens; only padding on the "
                "left or on the right of a row is supported"
            )
        spans.append((first, first + count))
    return spans


def _refuse_documents_of_padding(said: Rows, spans: Sequence[tuple[int, int]]) -> None:
    for row, (starts, (first, stop)) in enumerate(zip(said, spans, strict=True)):
        inside = [s for s in starts if 0 < s < first or stop < s < starts[-1]]
        if inside:
            raise MeshAttentionError(
                f"cu_seqlens begin a document at token {inside[0]} of row {row}, inside what "
                "attention_mask says is padding; leave one of them out"
            )
