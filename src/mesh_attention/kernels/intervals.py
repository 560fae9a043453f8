"""Row ranges as unions of intervals of rows: what a query sees of keys that lie in a few runs."""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels.interface import RowRange

_MOST_RUNS = 4096
_FAR = 1 << 40  # behind every row


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
    breaks = torch.ones_like(position, dtype=torch.bool)
    breaks[1:] = position[1:] != position[:-1] + 1
    first_row = breaks.nonzero().flatten()
    if len(first_row) * mask.num_intervals > _MOST_RUNS:
        raise MeshAttentionError(
            f"keys that lie in {len(first_row)} runs are too many intervals for cudnn_ranges"
        )
    if lo.dim() == 1:
        lo, hi = lo[None], hi[None]
    start = position[first_row].long()[:, None]
    length = torch.diff(first_row, append=first_row.new_tensor([len(position)]))[:, None]
    # (S, runs * intervals): where what is seen of a run begins and ends, as rows.
    first_row = first_row[:, None]
    low, high = (
        (first_row + torch.minimum((bound.T[:, None] - start).clamp_(min=0), length)).flatten(1)
        for bound in (lo, hi)
    )
    seen = (low < high) & (start >= 0).expand(len(start), len(lo)).flatten()
    low, high = low.masked_fill(~seen, -1), high.masked_fill(~seen, -1)
    before = torch.cummax(high, dim=1).values.roll(1, dims=1)
    before[:, 0] = -1
    opens = seen & (low != before)
    number = opens.cumsum(dim=1) - 1  # of the interval that a run belongs to
    most = max(int(number.max()) + 1, 1)
    target = number.clamp_(min=0)
    begins = torch.full((len(low), most), _FAR, device=device)
    ends = torch.full((len(low), most), -1, device=device)
    begins.scatter_reduce_(1, target, low.masked_fill(~seen, _FAR), "amin")
    ends.scatter_reduce_(1, target, high, "amax")
    # Intervals that a query does not have are empty ones behind its last.
    ends = ends.clamp_(min=0).cummax(dim=1).values
    begins = torch.minimum(begins, ends)
    pairs = torch.stack((begins, ends), dim=2).flatten(1).int()  # b0, e0, b1, e1, ...
    if bool((begins[:, 0] > 0).any()):
        pairs = torch.cat((pairs.new_zeros(len(low), 1), pairs), dim=1)
    else:
        pairs = pairs[:, 1:]
    return pairs.T.contiguous()
