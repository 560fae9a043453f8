"""The blocks of a mask that a Triton kernel has to look at, made once by a few tensor operations.

Queries and keys are cut into blocks. Of each pair of blocks all, some or none of the pairs are
visible, which follows from the smallest and largest positions. A kernel wants, for each block of
queries, the blocks of keys that it sees whole and those that it must mask; for the gradients of
keys the same the other way round. Visible blocks lie side by side mostly, so they are kept as runs
of block numbers: those of 4,096 x 4,096 blocks take kilobytes, where a list of all of them would
take megabytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mesh_attention.kernels.interface import BlockMask, Causal, RowRange
from mesh_attention.kernels.visibility import block_states, check_mask

_NEVER = 2**31 - 1  # a position that no key has

# A kernel looks for the next run after each block, also after the last.
_RUNS_PAST_THE_END = 4


class RangeBlocks(NamedTuple):
    """All int32, on the device of the block. Tables of rows have whole blocks: no row past the
    last sees anything, and no key there is anywhere."""

    lo: Tensor  # (rows in whole blocks,), or (listed_intervals, such rows)
    hi: Tensor  # as lo
    key_position: Tensor  # (keys in whole blocks,)
    runs: Tensor  # [first, last + 1) of each run of blocks, one after another
    # Five columns: number of the block; where its runs begin that are seen whole, and how many
    # blocks they have; the same of runs to be masked. Those with the most work come first.
    by_query: Tensor
    by_key: Tensor


def listed_intervals(mask: BlockMask) -> int:
    """A power of two, since a kernel is compiled for each; those too many are empty."""
    intervals = mask.num_intervals if isinstance(mask, RowRange) else 1
    return 1 << (intervals - 1).bit_length()


def range_blocks(
    mask: BlockMask, num_queries: int, num_keys: int, block: int, device: torch.device
) -> RangeBlocks:
    """Lists of blocks of `block` queries or keys. Made at the first call for a mask, whatever
    stream that is on, and kept with the mask."""
    if not isinstance(mask, RowRange):
        check_mask(mask, num_queries, num_keys)
        mask = _as_range(isinstance(mask, Causal), num_queries, num_keys, device)
    key = ("range_blocks", block, device)
    blocks: RangeBlocks | None = mask.kept.get(key)
    if blocks is None:
        check_mask(mask, num_queries, num_keys)
        blocks = mask.kept[key] = _make(mask, block, device)
        if device.type == "cuda":  # later calls may be on other streams
            torch.cuda.current_stream(device).synchronize()
    return blocks


@lru_cache(maxsize=64)
def _as_range(causal: bool, num_queries: int, num_keys: int, device: torch.device) -> RowRange:
    row, key = torch.arange(num_queries, device=device), torch.arange(num_keys, device=device)
    hi = row + 1 if causal else torch.full_like(row, num_keys)
    return RowRange(torch.zeros_like(row), hi, key)


def _make(mask: RowRange, block: int, device: torch.device) -> RangeBlocks:
    # Clamped also for a copy of our own: a view may begin anywhere, and kernels read it aligned.
    lo, hi, key_position = (
        x.to(device, non_blocking=True).clamp(max=_NEVER).to(torch.int32)
        for x in (mask.lo, mask.hi, mask.key_position)
    )
    if lo.dim() == 2:
        empty = listed_intervals(mask) - len(lo)
        lo, hi = (pad(x, (0, 0, 0, empty)) for x in (lo, hi))
    all_QK, some_QK = block_states(lo, hi, key_position, block, block)
    listed = (all_QK, some_QK, all_QK.mT, some_QK.mT)
    # Of a row of blocks: where runs begin and end, by turns. `runs` holds those of all rows.
    edges = [_edges(seen) for seen in listed]
    ends = torch.cat([x.sum(dim=1) for x in edges]).cumsum(dim=0)
    firsts = (pad(ends, (1, 0))[:-1]).split_with_sizes([len(x) for x in edges])
    counts = [seen.sum(dim=1) for seen in listed]
    # The one place where the host waits for the device.
    at = torch.cat([x.flatten() for x in edges]).nonzero()[:, 0]
    of_queries = edges[0].numel() + edges[1].numel()
    runs = torch.where(
        at < of_queries, at % edges[0].shape[1], (at - of_queries) % edges[2].shape[1]
    )
    lo, hi = (pad(x, (0, -lo.shape[-1] % block)) for x in (lo, hi))
    return RangeBlocks(
        lo,
        hi,
        pad(key_position, (0, -len(key_position) % block), value=-1),
        pad(runs, (0, _RUNS_PAST_THE_END)).to(torch.int32),
        _table(firsts[0], counts[0], firsts[1], counts[1]),
        _table(firsts[2], counts[2], firsts[3], counts[3]),
    )


def _edges(seen_RC: Tensor) -> Tensor:
    """(R, C + 1): where a run of True begins, and where the first False after it is."""
    padded = pad(seen_RC, (1, 1))
    return padded[:, 1:] != padded[:, :-1]


def _table(first_all: Tensor, num_all: Tensor, first_some: Tensor, num_some: Tensor) -> Tensor:
    """The blocks with the most work first: what is left for the end is then short."""
    order = (num_all + num_some).argsort(descending=True, stable=True)
    columns = torch.stack((first_all, num_all, first_some, num_some), dim=1)[order]
    return torch.cat((order[:, None], columns), dim=1).to(torch.int32)
