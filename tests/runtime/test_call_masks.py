"""What a kernel is told of the rows of a buffer, from a few numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mesh_attention import Mask, Problem
from mesh_attention.kernels.intervals import interval_ends
from mesh_attention.kernels.visibility import dense_mask
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.runs import Run
from mesh_attention.runtime.call_masks import _runs, row_range

CPU = torch.device("cpu")
RANKS, SLOTS = 8, 6
TOKENS = RANKS * SLOTS
MASKS = {
    "documents": Mask(causal=True, documents=(0, 5, 6, 20, 41, TOKENS)),
    "window": Mask(causal=True, window=(7, 0)),
    "causal": Mask(causal=True),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_chunk_of_all_ranks_is_one_run_and_seen_as_one_by_one(kind: str, mask: Mask) -> None:
    layout = Layout(LayoutKind(kind), TOKENS, RANKS)
    chunk = tuple((rank * SLOTS, rank * SLOTS + SLOTS // 2) for rank in range(RANKS))
    runs = _runs(layout, chunk)
    one_by_one = tuple(run for span in chunk for run in layout.runs(*span))
    assert len(one_by_one) == RANKS
    assert len(runs) == 1  # a zigzag's first chunks lie in order too
    rows = Problem(TOKENS, 1, 8, mask=mask).rows
    queries = (Run(0, TOKENS),)
    told, looked = (row_range(rows, queries, keys, CPU) for keys in (runs, one_by_one))
    for name in ("lo", "hi", "key_position"):
        assert torch.equal(getattr(told, name), getattr(looked, name))
    assert told.ascending
    assert looked.ascending
    ends = interval_ends(told, CPU)
    row = torch.arange(len(told.key_position))
    edges = [torch.zeros(TOKENS, dtype=torch.int32), *ends]
    seen = sum(
        ((row >= a[:, None]) & (row < b[:, None])).int()
        for at, (a, b) in enumerate(pairwise(edges))
        if at % 2 == 0
    )
    expected = dense_mask(told, TOKENS, len(row), CPU)
    assert expected is not None
    assert torch.equal(seen, expected.int())


def test_rows_that_turn_back_or_are_padding_are_not_called_ascending() -> None:
    rows = Problem(10, 1, 8, mask=Mask(causal=True)).rows
    queries = (Run(0, 10),)
    assert row_range(rows, queries, (Run(0, 3), Run(5, 5)), CPU).ascending
    assert not row_range(rows, queries, (Run(5, 5), Run(0, 3)), CPU).ascending
    assert not row_range(rows, queries, (Run(5, 6),), CPU).ascending
