"""The lists of visible blocks against the whole matrix of visible pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_cases import RANGES, MaskMaker, causal, full

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import Causal, Full, RowRange
from mesh_attention.kernels.range_blocks import RangeBlocks, range_blocks
from mesh_attention.kernels.visibility import dense_mask

CPU = torch.device("cpu")
SIZES = [(1, 2), (17, 3), (64, 64), (127, 129), (129, 127), (200, 200)]


def listed(blocks: RangeBlocks, table: torch.Tensor) -> Iterator[tuple[int, set[int], set[int]]]:
    """(block, those it sees whole, those to be masked), as a kernel walks over the runs."""
    runs = blocks.runs.tolist()
    for block, *lists in table.tolist():
        results: list[set[int]] = []
        for run, count in (lists[:2], lists[2:]):
            seen: list[int] = []
            while len(seen) < count:
                seen += range(runs[run], runs[run + 1])
                run += 2
            assert len(seen) == len(set(seen)) == count
            results.append(set(seen))
        yield block, results[0], results[1]


@pytest.mark.parametrize("maker", [full, causal, *RANGES], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lists_hold_every_visible_pair_and_mask_all_but_whole_blocks(
    maker: MaskMaker, size: tuple[int, int]
) -> None:
    S, T = size if maker is not causal else (size[0], size[0])
    mask, N = maker(S, T), 16
    blocks = range_blocks(mask, S, T, N, CPU)
    dense = dense_mask(mask, S, T, CPU)
    visible = torch.ones(S, T, dtype=torch.bool) if dense is None else dense
    wholes, masked = set(), set()
    for query, all_of, some_of in listed(blocks, blocks.by_query):
        wholes |= {(query, key) for key in all_of}
        masked |= {(query, key) for key in some_of}
    assert not wholes & masked
    for query in range(-(-S // N)):
        for key in range(-(-T // N)):
            cell = visible[query * N : (query + 1) * N, key * N : (key + 1) * N]
            if (query, key) in wholes:
                assert cell.all()
                assert cell.shape == (N, N)  # kernels look at no bounds there
            elif (query, key) not in masked:
                assert not cell.any()
            # Sorted keys leave no doubt; scattered ones may be between those that are seen.
            elif maker in (full, causal):
                assert cell.any()
                assert not cell.all() or cell.shape != (N, N)
    turned = list(listed(blocks, blocks.by_key))
    assert {(query, key) for key, all_of, _ in turned for query in all_of} == wholes
    assert {(query, key) for key, _, some_of in turned for query in some_of} == masked
    for table, count in ((blocks.by_query, -(-S // N)), (blocks.by_key, -(-T // N))):
        assert sorted(table[:, 0].tolist()) == list(range(count))
        work = (table[:, 2] + table[:, 4]).tolist()
        assert work == sorted(work, reverse=True)


def test_a_row_that_sees_nothing_hides_no_block_and_leaves_none_whole() -> None:
    lo, hi = torch.zeros(32, dtype=torch.int64), torch.full((32,), 64)
    lo[5], hi[5] = 2**40, 0  # seen by no key, and too large for 32 bits
    lo[16:], hi[16:] = 7, 7
    mask = RowRange(lo, hi, torch.arange(64))
    blocks = range_blocks(mask, 32, 64, 16, CPU)
    assert list(listed(blocks, blocks.by_query)) == [(0, set(), {0, 1, 2, 3}), (1, set(), set())]


@pytest.mark.parametrize("intervals", [1, 3])
def test_tables_of_rows_have_whole_blocks_in_which_nothing_more_is_seen(intervals: int) -> None:
    lo = torch.arange(intervals)[:, None].expand(intervals, 37).squeeze(0) * 10
    blocks = range_blocks(RowRange(lo, lo + 4, torch.arange(50)), 37, 50, 16, CPU)
    assert blocks.lo.shape == blocks.hi.shape == ((48,) if intervals == 1 else (4, 48))
    assert blocks.key_position.tolist() == [*range(50), *[-1] * 14]
    assert torch.equal(blocks.lo[..., 37:], blocks.hi[..., 37:])
    assert torch.equal(blocks.lo[..., :37][:intervals] if intervals > 1 else blocks.lo[:37], lo)


def test_lists_are_made_once_for_a_mask_and_a_size_of_blocks() -> None:
    mask = RowRange(torch.zeros(64, dtype=torch.int64), torch.arange(64), torch.arange(64))
    first = range_blocks(mask, 64, 64, 16, CPU)
    assert range_blocks(mask, 64, 64, 16, CPU) is first
    assert range_blocks(mask, 64, 64, 32, CPU) is not first
    for plain in (Full(), Causal()):
        once = range_blocks(plain, 64, 64, 16, CPU)
        assert range_blocks(type(plain)(), 64, 64, 16, CPU) is once


def test_lists_of_a_long_sequence_are_small() -> None:
    """2,048 x 2,048 blocks, as a quarter of a million tokens have, here of one row each."""
    row = torch.arange(2048)
    mask = RowRange(torch.zeros_like(row), row + 1, row)
    blocks = range_blocks(mask, 2048, 2048, 1, CPU)
    assert sum(x.numel() * x.element_size() for x in blocks) < 2**19


def test_masks_of_other_sizes_are_refused() -> None:
    row = torch.arange(8)
    with pytest.raises(MeshAttentionError, match=r"RowRange.lo has shape \(8,\), not \(9,\)"):
        range_blocks(RowRange(row, row, row), 9, 8, 16, CPU)
    with pytest.raises(MeshAttentionError, match="a Causal block must be square"):
        range_blocks(Causal(), 9, 8, 16, CPU)
