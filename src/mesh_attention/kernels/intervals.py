"""Row ranges as unions of intervals of rows: what a query sees of keys that lie in a few runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import RowRange

_MOST_RUNS = 4096
_FAR = 1 << 40  # behind every row
_MOST_CELLS = 1 << 19  # of queries by runs of keys, some eighty bytes for each


def interval_ends(mask: RowRange, device: torch.device) -> Tensor:
    """(2 n + 1, S) int32: what a query sees as `[0, F0) u [F1, F2) u ...`, sorted.

    Keys that follow each other in rows and positions form runs. What a query sees of a run are at
    most its own intervals, in order; those that touch are one.
    """
    lo, hi, position = (x.to(device, torch.int32) for x in (mask.lo, mask.hi, mask.key_position))
    if mask.ascending and lo.dim() == 1:
        # One interval of rows: nothing to look for, and nothing that the host would wait for.
        low, high = torch.searchsorted(position, torch.stack((lo, hi)), out_int32=True)
        high = torch.maximum(low, high)
        if mask.from_first:
            return high[None]
        return torch.stack((torch.zeros_like(low), low, high))
    if len(position) == 0:
        return lo.new_zeros(1, lo.shape[-1])
    breaks = torch.ones_like(position, dtype=torch.bool)
    # What follows padding, which is at -1, is the beginning of a run, though it be at 0.
    breaks[1:] = (position[1:] != position[:-1] + 1) | (position[:-1] < 0)
    first_row = breaks.nonzero().flatten()
    if len(first_row) * mask.num_intervals > _MOST_RUNS:
        raise MeshAttentionError(
            f"keys that lie in {len(first_row)} runs are too many intervals for cudnn_ranges"
        )
    if lo.dim() == 1:
        lo, hi = lo[None], hi[None]
    start = position[first_row].long()[:, None]
    length = torch.diff(first_row, append=first_row.new_tensor([len(position)]))[:, None]
    runs = _Runs(first_row[:, None], start, length)
    # Some queries at a time: all of a long sequence by all runs of keys are more memory than the
    # pass takes that the mask is for.
    some = max(1, _MOST_CELLS // max(1, len(first_row) * len(lo)))
    num_queries = lo.shape[1]
    found = [
        _pairs(runs, lo[:, at : at + some], hi[:, at : at + some])
        for at in range(0, max(num_queries, 1), some)
    ]
    most = max(x.shape[1] for x in found)
    # Intervals that a query does not have are empty ones behind its last.
    pairs = torch.cat(
        [torch.cat((x, x[:, -1:].expand(-1, most - x.shape[1])), dim=1) for x in found]
    )
    if bool((pairs[:, 0] > 0).any()):
        pairs = torch.cat((pairs.new_zeros(len(pairs), 1), pairs), dim=1)
    else:
        pairs = pairs[:, 1:]
    return pairs.T.contiguous()


class _Runs(NamedTuple):
    """Of keys, each a column: the rows and the positions where they begin, and how many."""

    row: Tensor
    position: Tensor
    length: Tensor


def _pairs(runs: _Runs, lo: Tensor, hi: Tensor) -> Tensor:
    """(S, 2 n) int32: where what queries see begins and ends, b0, e0, b1, e1, ..."""
    # (S, runs * intervals): where what is seen of a run begins and ends, as rows.
    low, high = (
        (
            runs.row + torch.minimum((bound.T[:, None] - runs.position).clamp_(min=0), runs.length)
        ).flatten(1)
        for bound in (lo, hi)
    )
    real = (runs.position >= 0).expand(len(runs.row), len(lo)).flatten()
    seen = (low < high) & real
    low, high = low.masked_fill_(~seen, -1), high.masked_fill_(~seen, -1)
    before = torch.cummax(high, dim=1).values.roll(1, dims=1)
    before[:, 0] = -1
    opens = seen & (low != before)
    number = opens.cumsum(dim=1) - 1  # of the interval that a run belongs to
    most = max(int(number.max()) + 1, 1) if number.numel() else 1
    target = number.clamp_(min=0)
    begins = torch.full((len(low), most), _FAR, device=low.device)
    ends = torch.full((len(low), most), -1, device=low.device)
    begins.scatter_reduce_(1, target, low.masked_fill_(~seen, _FAR), "amin")
    ends.scatter_reduce_(1, target, high, "amax")
    ends = ends.clamp_(min=0).cummax(dim=1).values
    begins = torch.minimum(begins, ends)
    return torch.stack((begins, ends), dim=2).flatten(1).int()
